// Prompt groups: sorted, searched, and opened down to the rows of each rollout.

const COLUMNS = [
  several ? { key: "step", head: "step", value: (group) => group.step, cell: (group) => steps[group.step].name } : null,
  { key: "id", head: "group", value: (group) => group.id, cell: (group) => group.id },
  groups.some((group) => group.adapter)
    ? { key: "adapter", head: "adapter", value: (group) => group.adapter, cell: (group) => group.adapter }
    : null,
  { key: "rows", head: "rows", value: (group) => group.rows, cell: (group) => whole(group.rows) },
  { key: "rollouts", head: "rollouts", value: (group) => group.rollouts, cell: (group) => whole(group.rollouts) },
  {
    key: "fan_out",
    head: "fan-out",
    value: (group) => (group.fan_out ? group.fan_out[1] : null),
    cell: (group) => range(group.fan_out, whole),
  },
  { key: "mean", head: "reward mean", value: (group) => group.mean },
  { key: "row_mean", head: "by rows", value: (group) => group.row_mean },
  { key: "std", head: "std", value: (group) => group.std },
  {
    key: "advantages",
    head: "advantages",
    value: (group) => (group.advantages ? group.advantages[1] : null),
    cell: (group) => range(group.advantages),
  },
  { key: "change", head: "change", value: (group) => group.change },
  { key: "flips", head: "other sign", value: (group) => group.flips, cell: (group) => whole(group.flips) },
].filter(Boolean);

const NAMES = new Set(["step", "id", "adapter"]);
const view = { sort: null, descending: true, search: "", limit: GROUPS_AT_ONCE, open: new Set() };
const texts = groups.map((group) =>
  [
    steps[group.step].name,
    group.id,
    group.adapter,
    ...group.notes,
    ...group.members.map((member) => `rollout ${member.id}`),
  ]
    .join("\n")
    .toLowerCase(),
);

function compare(a, b) {
  const [left, right] = [view.sort.value(groups[a]), view.sort.value(groups[b])];
  if (left === right) return a - b;
  if (left === null || left === undefined) return 1;
  if (right === null || right === undefined) return -1;
  const order =
    typeof left === "number" && typeof right === "number"
      ? left - right
      : String(left).localeCompare(String(right), undefined, { numeric: true });
  return view.descending ? -order : order;
}

function chosenGroups() {
  const wanted = view.search.toLowerCase().split(/\s+/).filter(Boolean);
  const chosen = groups.map((_, index) => index).filter((index) => wanted.every((word) => texts[index].includes(word)));
  return view.sort ? chosen.sort(compare) : chosen;
}

const body = el("tbody", {});
const shownCount = el("p", { class: "note", id: "shown", "aria-live": "polite" });
const more = el(
  "button",
  {
    type: "button",
    id: "more",
    onclick: () => {
      view.limit += 4 * GROUPS_AT_ONCE;
      showGroups();
    },
  },
  "Show more",
);
const search = el("input", {
  type: "search",
  id: "search",
  placeholder: "group, rollout, note …",
  "aria-label": "search groups",
  autocomplete: "off",
  oninput: () => {
    view.search = search.value;
    view.limit = GROUPS_AT_ONCE;
    showGroups();
  },
});
const sortChoice = el(
  "select",
  {
    id: "sort",
    "aria-label": "sort groups by",
    onchange: () => sortBy(COLUMNS.find((column) => column.key === sortChoice.value)),
  },
  el("option", { value: "" }, "order of the dump"),
  COLUMNS.map((column) => el("option", { value: column.key }, column.head)),
);
const heads = COLUMNS.map((column) =>
  el(
    "th",
    { scope: "col", class: NAMES.has(column.key) ? "text" : null },
    el("button", { type: "button", onclick: () => sortBy(column) }, column.head),
  ),
);

function sortBy(column) {
  // Numbers from the largest down, names from the first on; the same column again turns the order around.
  view.descending =
    column && column === view.sort ? !view.descending : Boolean(column) && typeof column.value(groups[0]) === "number";
  view.sort = column || null;
  sortChoice.value = column ? column.key : "";
  showGroups();
}

function showGroups() {
  const chosen = chosenGroups();
  const visible = chosen.slice(0, view.limit);
  heads.forEach((head, index) => {
    const sorted = COLUMNS[index] === view.sort;
    if (sorted) head.setAttribute("aria-sort", view.descending ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  });
  body.replaceChildren(...visible.flatMap(groupRows));
  more.hidden = visible.length === chosen.length;
  shownCount.textContent =
    chosen.length === groups.length
      ? `${counted(groups.length, "group")}${visible.length < chosen.length ? `, ${visible.length} shown` : ""}`
      : `${chosen.length} of ${counted(groups.length, "group")}${visible.length < chosen.length ? `, ${visible.length} shown` : ""}`;
}

function groupRows(index) {
  const group = groups[index];
  const open = view.open.has(index);
  const toggle = el(
    "button",
    {
      type: "button",
      class: "open",
      "aria-expanded": String(open),
      "aria-label": `rollouts of group ${group.id}`,
      onclick: () => {
        if (open) view.open.delete(index);
        else view.open.add(index);
        showGroups();
      },
    },
    open ? "▾" : "▸",
  );
  const cells = COLUMNS.map((column, place) =>
    el(
      "td",
      { "data-name": column.head, class: `${NAMES.has(column.key) ? "text" : "number"} ${column.key}` },
      place ? null : toggle,
      column.cell ? column.cell(group) : number(column.value(group)),
    ),
  );
  const row = el(
    "tr",
    { class: group.flips ? "group flipped" : "group", "data-group": group.id, id: `group-${index}` },
    cells,
    el(
      "td",
      { class: "notes", "data-name": "notes" },
      group.notes.map((note) => el("span", { class: `badge ${group.unusual ? "warn" : ""}` }, note)),
    ),
  );
  if (!open) return [row];
  return [row, el("tr", { class: "inside" }, el("td", { colspan: COLUMNS.length + 1 }, groupInside(group)))];
}

function groupInside(group) {
  const left =
    group.more_rollouts > 0
      ? el(
          "p",
          { class: "note" },
          `${counted(group.more_rollouts, "more rollout")} of this group are not in this page.`,
        )
      : null;
  return el("div", { class: "rollouts" }, group.members.map(rolloutItem), left);
}

function rolloutItem(member) {
  const title = [
    el("strong", {}, `rollout ${member.id}`),
    ` ${counted(member.fan_out, "row")}, reward ${number(member.reward)}, advantage ${range(member.advantages)} `,
    member.notes.map((note) => el("span", { class: "badge warn" }, note)),
    member.rows.some((row) => row.flips) ? el("span", { class: "badge bad" }, "other sign") : null,
  ];
  return lazy(title, () => rolloutInside(member), { class: "rollout", "data-rollout": member.id });
}

function rolloutInside(member) {
  const left =
    member.more_rows > 0
      ? el("p", { class: "note" }, `${counted(member.more_rows, "more row")} of this rollout are not in this page.`)
      : null;
  return el(
    "div",
    {},
    trajectoryTree(member.tree, (leaf) => rowCard(member.rows[leaf.row])),
    left,
    el("h4", {}, "Why"),
    explained(member.explanation),
  );
}

function rowCard(row) {
  const response = row.response === null ? " tokens" : ` of ${counted(row.response, "response token")}`;
  const total = row.tokens === null ? "" : `, ${whole(row.tokens)} in all`;
  const trained = `${whole(row.trainable)}${response} trained${total}`;
  const fact = (name, value) =>
    el("span", { class: "fact" }, el("span", { class: "muted" }, name), " ", el("span", { class: "number" }, value));
  return el(
    "div",
    { class: "card", "data-row": row.row },
    el(
      "div",
      {},
      el("strong", {}, `row ${row.row} `),
      row.speaks ? el("span", { class: "badge speaks" }, "mainstream row") : null,
      row.state.map((state) => el("span", { class: "badge warn" }, state)),
      row.flips ? el("span", { class: "badge bad" }, "other sign") : null,
    ),
    row.strip ? maskStrip(row.strip, `loss mask: ${trained}`) : null,
    el("div", { class: "note" }, trained),
    el(
      "div",
      { class: "facts" },
      fact("reward", number(row.reward)),
      fact("advantage", number(row.advantage)),
      row.baseline === null ? null : fact(rowsName, number(row.baseline)),
      fact("weight of a token", number(row.weight)),
    ),
    explained(row.explanation),
  );
}

function groupsSection() {
  const all =
    sample.groups === groups.length
      ? null
      : el(
          "p",
          { class: "note" },
          `${whole(groups.length)} of ${counted(sample.groups, "group")} are in this page: in each step first those with unusual notes, then those that the baseline changes most. `,
          "For others name fewer dumps, or ask ",
          el("code", {}, "miles-norm explain DUMP --group ID"),
          ".",
        );
  return section(
    "groups",
    "Prompt groups",
    all,
    el("div", { class: "controls" }, search, el("label", { class: "narrow" }, "sort by ", sortChoice)),
    shownCount,
    el(
      "div",
      { class: "scroll" },
      el("table", { class: "groups" }, el("thead", {}, el("tr", {}, heads, el("th", { scope: "col" }, "notes"))), body),
    ),
    more,
  );
}

function openGroup(index) {
  view.search = search.value = "";
  view.open.add(index);
  view.limit = Math.max(view.limit, chosenGroups().indexOf(index) + 1);
  showGroups();
  document.getElementById(`group-${index}`).scrollIntoView({ block: "start" });
}

document
  .getElementById("page")
  .replaceChildren(
    ...[
      header(),
      findingsSection(),
      tiles(),
      runSection(),
      el("div", { class: "pair" }, weightSection(), advantageSection()),
      groupsSection(),
      el("footer", { class: "note" }, `miles_norm ${pageData.version}`),
    ].filter(Boolean),
  );
showGroups();
