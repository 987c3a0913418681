// The parts of the report that are drawn: the run over its steps, weights, and advantages against the baseline.

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
      return {
        one,
        value,
        item: el(
          "span",
          { class: "key" },
          el("i", { style: `background: var(--${one.color})`, class: one.dashed ? "dashed" : null }),
          one.name,
          " ",
          value,
        ),
      };
    });
    const step = el("span", { class: "muted" });
    const reading = (index) => {
      const shown = index === null ? at.length - 1 : index;
      step.textContent = index === null ? "last" : steps[shown].name;
      for (const { one, value } of legend) value.textContent = figure(one.values[shown]);
    };
    reading(null);
    return el(
      "figure",
      {},
      el("figcaption", {}, title),
      el(
        "div",
        { class: "legend" },
        legend.map((entry) => entry.item),
        step,
      ),
      plotArea((width) =>
        lineChart(width, at, known, { label: title, x: numbered ? "rollout step" : "dump", from, reading }),
      ),
    );
  };
  const vs = `vs_${baseline.name}/`;
  return section(
    "run",
    `The run over ${counted(steps.length, "step")}`,
    el(
      "div",
      { class: "charts" },
      chart("Reward mean", [
        { name: "per rollout", metric: "reward_mean", color: "rollouts" },
        { name: "per row", metric: "row_reward_mean", color: "rows", dashed: true },
      ]),
      chart(
        "Groups without a signal",
        [
          { name: "all", metric: "zero_variance_share", color: "rollouts" },
          { name: "all right", metric: "all_right_share", color: "third" },
          { name: "all wrong", metric: "all_wrong_share", color: "rows", dashed: true },
        ],
        0,
      ),
      chart(
        "Rows per rollout",
        [
          { name: "mean", metric: "fan_out_mean", color: "rollouts" },
          { name: "most", metric: "fan_out_max", color: "rows", dashed: true },
        ],
        0,
      ),
      chart(
        `Trained rows with the other sign under ${rowsName}`,
        [{ name: "share", metric: `${vs}sign_flip_share`, color: "bad" }],
        0,
      ),
      chart(
        `Mean change of advantages against ${rowsName}`,
        [{ name: "mean", metric: `${vs}mean_abs_change`, color: "rows" }],
        0,
      ),
      chart(
        "Inequality of what rollouts weigh (Gini)",
        [
          { name: "rollout mean", metric: "weight/rollout_mean_gini", color: "rollouts" },
          { name: "mean over rows", metric: "weight/sample_mean_gini", color: "rows", dashed: true },
          { name: "over tokens", metric: "weight/token_mean_gini", color: "third" },
        ],
        0,
      ),
    ),
  );
}

// Dots

const place = (index) =>
  `rollout ${points.rollout[index]}, group ${points.group[index]}${several ? `, ${steps[points.step[index]].name}` : ""}`;
const openPoint = (index) => () => {
  const found = groups.findIndex((group) => group.id === points.group[index] && group.step === points.step[index]);
  if (found >= 0) openGroup(found);
};
const drawn = () =>
  points.rollout.length < sample.rollouts
    ? el(
        "p",
        { class: "note" },
        `${whole(points.rollout.length)} of ${counted(sample.rollouts, "counted rollout")} are drawn, evenly spaced.`,
      )
    : null;

function weightSection() {
  const names = Object.keys(points)
    .filter((name) => name.startsWith("weight/"))
    .map((name) => name.slice(7));
  const choice = el(
    "select",
    { id: "aggregation" },
    names.map((name) => el("option", { value: name, selected: name === "sample_mean" }, name)),
  );
  const dots = () =>
    points.rollout.map((_, index) => {
      const weight = points[`weight/${choice.value}`][index];
      // Rollouts of one fan-out are spread a little so that they do not hide each other; the spread is the same every time.
      const spread = (((index * 7919) % 97) / 97 - 0.5) * 0.5;
      return {
        x: points.fan_out[index] + spread,
        y: weight,
        kind: "rollouts",
        text: `${place(index)}: ${counted(points.fan_out[index], "row")}, weight ${number(weight)}`,
        open: openPoint(index),
      };
    });
  const draw = (width) =>
    scatter(
      width,
      dots(),
      {
        label: "Fan-out against weight",
        x: "rows of the rollout",
        y: "times an equal share",
        whole: true,
        alsoY: [0, 1.2],
        alsoX: [0.5, 1.5],
      },
      (xs) => [{ from: [xs[0], 1], to: [xs[1], 1], text: "equal share", at: [xs[1], 1], anchor: "end" }],
    );
  const holder = el("div", {}, plotArea(draw));
  choice.addEventListener("change", () => holder.replaceChildren(plotArea(draw)));
  return section(
    "weights",
    "Fan-out against weight",
    el(
      "p",
      { class: "note" },
      "What each rollout weighs in the loss. Under rollout_mean every rollout weighs the same, however many rows it has.",
    ),
    el("label", {}, "loss aggregation ", choice),
    holder,
    drawn(),
  );
}

function advantageSection() {
  if (points.baseline.every((value) => value === null)) return null;
  const flips = points.flips.filter(Boolean).length;
  const dots = points.rollout.map((_, index) => ({
    x: points.baseline[index],
    y: points.advantage[index],
    kind: points.flips[index] ? "flip" : "rollouts",
    text: `${place(index)}: reward ${number(points.reward[index])}, advantage ${number(points.advantage[index])}, ${rowsName} ${number(points.baseline[index])}`,
    open: openPoint(index),
  }));
  const draw = (width) =>
    scatter(
      width,
      dots,
      { label: "Advantages against the baseline", x: rowsName, y: "over rollouts", alsoX: [0], alsoY: [0] },
      (xs, ys) => {
        const [low, high] = [Math.max(xs[0], ys[0]), Math.min(xs[1], ys[1])];
        return [
          { from: [0, ys[0]], to: [0, ys[1]] },
          { from: [xs[0], 0], to: [xs[1], 0] },
          {
            from: [low, low],
            to: [high, high],
            text: "no change",
            at: [low + 0.86 * (high - low), low + 0.86 * (high - low)],
            anchor: "start",
          },
        ];
      },
    );
  return section(
    "advantages",
    "Advantages: over rollouts against the baseline",
    el(
      "div",
      { class: "legend" },
      el("span", { class: "key" }, el("i", { style: "background: var(--rollouts)" }), "same sign"),
      el("span", { class: "key" }, el("b", { class: "cross" }, "×"), `other sign: ${flips}`),
    ),
    plotArea(draw),
    el(
      "p",
      { class: "note" },
      "One mark per rollout, at the advantage of its mainstream row. A mark on the line does not change.",
    ),
    drawn(),
  );
}
