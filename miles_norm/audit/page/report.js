// The report of an audit: what is wrong, and figures.

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
  const what = [
    counted(total("rows"), "row"),
    counted(total("rollouts"), "rollout"),
    counted(total("groups"), "prompt group"),
  ];
  const from = several ? counted(steps.length, "dump") : steps[0].name;
  return el(
    "header",
    {},
    el("div", { class: "top" }, el("h1", {}, "Rollout audit"), themeButton()),
    el("p", {}, el("strong", {}, from), `: ${what.join(", ")}`),
    el(
      "p",
      { class: "muted" },
      `Advantages: ${pageData.estimator}. Compared with the baseline `,
      el("code", {}, baseline.name),
      `: ${baseline.rule}.`,
      pageData.settings.length ? ` Settings not at their defaults: ${pageData.settings.join(", ")}.` : "",
    ),
  );
}

// What is wrong

const title = (name) => name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");

function findingCard(finding) {
  const first = finding.places[0];
  const where = several
    ? el(
        "p",
        { class: "note" },
        `In ${finding.places.length} of ${counted(steps.length, "dump")}; shown for ${steps[first.step].name}.`,
      )
    : null;
  const shown = first.groups.map((id) => groups.findIndex((group) => group.id === id && group.step === first.step));
  const links = shown
    .filter((index) => index >= 0)
    .slice(0, 12)
    .map((index) =>
      el("button", { type: "button", class: "link", onclick: () => openGroup(index) }, `group ${groups[index].id}`),
    );
  const others = finding.places
    .slice(1, 1 + OTHERS)
    .map((place) => el("li", {}, el("strong", {}, steps[place.step].name), `: ${place.problem}`));
  if (finding.places.length > 1 + OTHERS)
    others.push(el("li", {}, `and ${counted(finding.places.length - 1 - OTHERS, "more dump")}`));
  return el(
    "li",
    { class: "finding", id: `finding-${finding.name}` },
    el("h3", {}, title(finding.name)),
    el("p", {}, first.problem),
    where,
    el("p", {}, el("strong", {}, "What to change: "), first.remedy),
    links.length ? el("p", { class: "links" }, links) : null,
    others.length
      ? el(
          "details",
          {},
          el("summary", {}, `in ${counted(finding.places.length - 1, "more dump")}`),
          el("ul", {}, others),
        )
      : null,
  );
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
  const tile = (name, value, text) =>
    el(
      "div",
      { class: "tile" },
      el("div", { class: "name" }, name),
      el("div", { class: "value" }, value),
      el("div", { class: "note" }, text),
    );
  const versus = (name) => metric(`vs_${baseline.name}/${name}`);
  return section(
    "figures",
    `Figures${last}`,
    el(
      "div",
      { class: "tiles" },
      tile("reward mean", number(metric("reward_mean")), `per rollout; ${number(metric("row_reward_mean"))} per row`),
      tile(
        "fan-out",
        fixed(metric("fan_out_mean")),
        `rows per rollout; ${whole(metric("fan_out_max"))} at most, ${percent(metric("single_row_rollout_share"))} have one`,
      ),
      tile(
        "no signal",
        percent(metric("zero_variance_share")),
        `of groups; all right ${percent(metric("all_right_share"))}, all wrong ${percent(metric("all_wrong_share"))}`,
      ),
      tile(
        "effective rollouts",
        `${whole(metric("effective_rollouts"))} of ${whole(metric("counted_rollouts"))}`,
        `with an advantage and tokens, in ${whole(metric("effective_groups"))} of ${whole(metric("groups"))} groups`,
      ),
      tile(
        "other sign",
        whole(versus("sign_flips")),
        `of ${whole(metric("trained_rows"))} trained rows under ${rowsName}`,
      ),
      tile(
        "weight by rows",
        `${fixed(metric("weight/sample_mean_min"))}–${fixed(metric("weight/sample_mean_max"))}`,
        "times an equal share, if the loss averages over rows",
      ),
    ),
    allFigures(),
  );
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
  const body = () =>
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        { class: "plain" },
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            heads.map((head) => el("th", {}, head)),
          ),
        ),
        el(
          "tbody",
          {},
          names.map((name) =>
            el(
              "tr",
              {},
              el("td", {}, el("code", {}, name)),
              cells(metrics[name]).map((value) => el("td", { class: "number" }, figure(value))),
            ),
          ),
        ),
      ),
    );
  return lazy(`All ${names.length} figures`, body);
}

function lazy(title, build, attributes) {
  const details = el("details", attributes, el("summary", {}, title));
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) details.append(build());
  });
  return details;
}
