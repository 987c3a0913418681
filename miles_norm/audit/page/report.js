// The report of an audit.

const { steps, metrics, groups, points, findings, sample, baseline } = pageData;
const several = steps.length > 1;
const GROUPS_AT_ONCE = 50;
const OTHERS = 20;
const metric = (name, step = steps.length - 1) => (metrics[name] ? metrics[name][step] : null);
const rowsName = `baseline ${baseline.name}`;

function section(id, title, ...content) {
  return el("section", { id }, el("h2", {}, title), content);
}

function header() {
  const total = (name) => (metrics[name] || []).reduce((sum, value) => sum + (value || 0), 0);
  const what = [counted(total("rows"), "row"), counted(total("rollouts"), "rollout"), counted(total("groups"), "prompt group")];
  const from = several ? counted(steps.length, "dump") : steps[0].name;
  return el("header", {},
    el("div", { class: "top" }, el("h1", {}, "Rollout audit"), themeButton()),
    el("p", {}, el("strong", {}, from), `: ${what.join(", ")}`),
    el("p", { class: "muted" }, `Advantages: ${pageData.estimator}. Compared with the baseline `, el("code", {}, baseline.name), `: ${baseline.rule}.`,
      pageData.settings.length ? ` Settings not at their defaults: ${pageData.settings.join(", ")}.` : ""));
}

// What is wrong

const title = (name) => name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");

function findingCard(finding) {
  const first = finding.places[0];
  const where = several ? el("p", { class: "note" }, `In ${finding.places.length} of ${counted(steps.length, "dump")}; shown for ${steps[first.step].name}.`) : null;
  const shown = first.groups.map((id) => groups.findIndex((group) => group.id === id && group.step === first.step));
  const links = shown.filter((index) => index >= 0).slice(0, 12).map((index) =>
    el("button", { type: "button", class: "link", onclick: () => openGroup(index) }, `group ${groups[index].id}`));
  const others = finding.places.slice(1, 1 + OTHERS).map((place) => el("li", {}, el("strong", {}, steps[place.step].name), `: ${place.problem}`));
  if (finding.places.length > 1 + OTHERS) others.push(el("li", {}, `and ${counted(finding.places.length - 1 - OTHERS, "more dump")}`));
  return el("li", { class: "finding", id: `finding-${finding.name}` },
    el("h3", {}, title(finding.name)),
    el("p", {}, first.problem), where,
    el("p", {}, el("strong", {}, "What to change: "), first.remedy),
    links.length ? el("p", { class: "links" }, links) : null,
    others.length ? el("details", {}, el("summary", {}, `in ${counted(finding.places.length - 1, "more dump")}`), el("ul", {}, others)) : null);
}

function findingsSection() {
  const content = findings.length
    ? el("ol", { class: "findings" }, findings.map(findingCard))
    : el("p", { class: "fine" }, "Nothing was found that needs a change.");
  return section("findings", findings.length ? `${counted(findings.length, "finding")}` : "No findings", content);
}

// Figures

function tiles() {
  const last = several ? ` of ${steps[steps.length - 1].name}` : "";
  const fixed = (value) => (value === null ? "–" : value.toFixed(2));
  const tile = (name, value, text) => el("div", { class: "tile" }, el("div", { class: "name" }, name), el("div", { class: "value" }, value), el("div", { class: "note" }, text));
  const versus = (name) => metric(`vs_${baseline.name}/${name}`);
  return section("figures", `Figures${last}`, el("div", { class: "tiles" },
    tile("reward mean", number(metric("reward_mean")), `per rollout; ${number(metric("row_reward_mean"))} per row`),
    tile("fan-out", fixed(metric("fan_out_mean")), `rows per rollout; ${whole(metric("fan_out_max"))} at most, ${percent(metric("single_row_rollout_share"))} have one`),
    tile("no signal", percent(metric("zero_variance_share")), `of groups; all right ${percent(metric("all_right_share"))}, all wrong ${percent(metric("all_wrong_share"))}`),
    tile("effective rollouts", `${whole(metric("effective_rollouts"))} of ${whole(metric("counted_rollouts"))}`, `with an advantage and tokens, in ${whole(metric("effective_groups"))} of ${whole(metric("groups"))} groups`),
    tile("other sign", whole(versus("sign_flips")), `of ${whole(metric("trained_rows"))} trained rows under ${rowsName}`),
    tile("weight by rows", `${fixed(metric("weight/sample_mean_min"))}–${fixed(metric("weight/sample_mean_max"))}`, "times an equal share, if the loss averages over rows"),
  ), allFigures());
}

const figure = (value) => (Number.isInteger(value) ? whole(value) : number(value));

function allFigures() {
  const names = Object.keys(metrics);
  const heads = several ? ["figure", "last", "mean", "least", "most"] : ["figure", "value"];
  const cells = (values) => {
    const known = values.filter((value) => value !== null);
    const last = values[values.length - 1];
    if (!several) return [last];
    return [last, known.reduce((sum, value) => sum + value, 0) / known.length, Math.min(...known), Math.max(...known)];
  };
  const body = () => el("div", { class: "scroll" }, el("table", { class: "plain" },
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", {}, head)))),
    el("tbody", {}, names.map((name) => el("tr", {}, el("td", {}, el("code", {}, name)), cells(metrics[name]).map((value) => el("td", { class: "number" }, figure(value))))))));
  return lazy(`All ${names.length} figures`, body);
}

function lazy(title, build, attributes) {
  const details = el("details", attributes, el("summary", {}, title));
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) details.append(build());
  });
  return details;
}

// The run over steps

function runSection() {
  if (!several) return null;
  const ids = steps.map((step) => step.rollout_id);
  const numbered = ids.every((id) => id !== null) && ids.every((id, index) => !index || id > ids[index - 1]);
  const at = numbered ? ids : ids.map((_, index) => index);
  const chart = (title, series, from) => {
    const known = series.filter((one) => metrics[one.metric]).map((one) => ({ ...one, values: metrics[one.metric] }));
    if (!known.length) return null;
    const legend = known.map((one) => {
      const value = el("span", { class: "number" });
      return { one, value, item: el("span", { class: "key" }, el("i", { style: `background: var(--${one.color})`, class: one.dashed ? "dashed" : null }), one.name, " ", value) };
    });
    const step = el("span", { class: "muted" });
    const reading = (index) => {
      const shown = index === null ? at.length - 1 : index;
      step.textContent = index === null ? "last" : steps[shown].name;
      for (const { one, value } of legend) value.textContent = figure(one.values[shown]);
    };
    reading(null);
    return el("figure", {}, el("figcaption", {}, title), el("div", { class: "legend" }, legend.map((entry) => entry.item), step),
      plotArea((width) => lineChart(width, at, known, { label: title, x: numbered ? "rollout step" : "dump", from, reading })));
  };
  const vs = `vs_${baseline.name}/`;
  return section("run", `The run over ${counted(steps.length, "step")}`, el("div", { class: "charts" },
    chart("Reward mean", [{ name: "per rollout", metric: "reward_mean", color: "rollouts" }, { name: "per row", metric: "row_reward_mean", color: "rows", dashed: true }]),
    chart("Groups without a signal", [{ name: "all", metric: "zero_variance_share", color: "rollouts" }, { name: "all right", metric: "all_right_share", color: "third" }, { name: "all wrong", metric: "all_wrong_share", color: "rows", dashed: true }], 0),
    chart("Rows per rollout", [{ name: "mean", metric: "fan_out_mean", color: "rollouts" }, { name: "most", metric: "fan_out_max", color: "rows", dashed: true }], 0),
    chart(`Trained rows with the other sign under ${rowsName}`, [{ name: "share", metric: `${vs}sign_flip_share`, color: "bad" }], 0),
    chart(`Mean change of advantages against ${rowsName}`, [{ name: "mean", metric: `${vs}mean_abs_change`, color: "rows" }], 0),
    chart("Inequality of what rollouts weigh (Gini)", [{ name: "rollout mean", metric: "weight/rollout_mean_gini", color: "rollouts" }, { name: "mean over rows", metric: "weight/sample_mean_gini", color: "rows", dashed: true }, { name: "over tokens", metric: "weight/token_mean_gini", color: "third" }], 0),
  ));
}

// Dots

const place = (index) => `rollout ${points.rollout[index]}, group ${points.group[index]}${several ? `, ${steps[points.step[index]].name}` : ""}`;
const openPoint = (index) => () => {
  const found = groups.findIndex((group) => group.id === points.group[index] && group.step === points.step[index]);
  if (found >= 0) openGroup(found);
};
const drawn = () => (points.rollout.length < sample.rollouts
  ? el("p", { class: "note" }, `${whole(points.rollout.length)} of ${counted(sample.rollouts, "counted rollout")} are drawn, evenly spaced.`)
  : null);

function weightSection() {
  const names = Object.keys(points).filter((name) => name.startsWith("weight/")).map((name) => name.slice(7));
  const choice = el("select", { id: "aggregation" }, names.map((name) => el("option", { value: name, selected: name === "sample_mean" }, name)));
  const dots = () => points.rollout.map((_, index) => {
    const weight = points[`weight/${choice.value}`][index];
    // Rollouts of one fan-out are spread a little so that they do not hide each other; the spread is the same every time.
    const spread = (((index * 7919) % 97) / 97 - 0.5) * 0.5;
    return { x: points.fan_out[index] + spread, y: weight, kind: "rollouts", text: `${place(index)}: ${counted(points.fan_out[index], "row")}, weight ${number(weight)}`, open: openPoint(index) };
  });
  const draw = (width) => scatter(width, dots(), { label: "Fan-out against weight", x: "rows of the rollout", y: "times an equal share", whole: true, alsoY: [0, 1.2], alsoX: [0.5, 1.5] },
    (xs) => [{ from: [xs[0], 1], to: [xs[1], 1], text: "equal share", at: [xs[1], 1], anchor: "end" }]);
  const holder = el("div", {}, plotArea(draw));
  choice.addEventListener("change", () => holder.replaceChildren(plotArea(draw)));
  return section("weights", "Fan-out against weight",
    el("p", { class: "note" }, "What each rollout weighs in the loss. Under rollout_mean every rollout weighs the same, however many rows it has."),
    el("label", {}, "loss aggregation ", choice), holder, drawn());
}

function advantageSection() {
  if (points.baseline.every((value) => value === null)) return null;
  const flips = points.flips.filter(Boolean).length;
  const dots = points.rollout.map((_, index) => ({
    x: points.baseline[index], y: points.advantage[index], kind: points.flips[index] ? "flip" : "rollouts",
    text: `${place(index)}: reward ${number(points.reward[index])}, advantage ${number(points.advantage[index])}, ${rowsName} ${number(points.baseline[index])}`,
    open: openPoint(index),
  }));
  const draw = (width) => scatter(width, dots, { label: "Advantages against the baseline", x: rowsName, y: "over rollouts", alsoX: [0], alsoY: [0] },
    (xs, ys) => {
      const [low, high] = [Math.max(xs[0], ys[0]), Math.min(xs[1], ys[1])];
      return [{ from: [0, ys[0]], to: [0, ys[1]] }, { from: [xs[0], 0], to: [xs[1], 0] }, { from: [low, low], to: [high, high], text: "no change", at: [low + 0.86 * (high - low), low + 0.86 * (high - low)], anchor: "start" }];
    });
  return section("advantages", "Advantages: over rollouts against the baseline",
    el("div", { class: "legend" }, el("span", { class: "key" }, el("i", { style: "background: var(--rollouts)" }), "same sign"),
      el("span", { class: "key" }, el("b", { class: "cross" }, "×"), `other sign: ${flips}`)),
    plotArea(draw), el("p", { class: "note" }, "One mark per rollout, at the advantage of its mainstream row. A mark on the line does not change."), drawn());
}
