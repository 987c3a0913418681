// Sessions of a running server, asked for every two seconds while the page is seen.

const POLL_MS = 2000;
const STORED_KEY = "miles_norm key";
const open = { sessions: new Set(), conversations: new Set() };
const cards = new Map();

// The key is taken from #key=KEY, and out of the address, so that it is in no bookmark; it lasts as long as the tab.
function storedKey() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  try {
    if (given !== null) sessionStorage.setItem(STORED_KEY, given);
    return given ?? sessionStorage.getItem(STORED_KEY) ?? "";
  } catch {
    return given ?? "";
  } finally {
    if (given !== null) history.replaceState(null, "", location.pathname);
  }
}

let key = storedKey();

class Refused extends Error {}

async function ask(path) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, { headers, cache: "no-store" });
  if (answer.status === 401) throw new Refused();
  if (answer.status === 404) return null;
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return answer.json();
}

const field = el("input", { type: "password", id: "key", "aria-label": "key of the server", autocomplete: "off" });
const form = el("form", { id: "key-form", hidden: true }, "Key of the server ", field, el("button", {}, "Show"));
const state = el("p", { class: "muted", id: "state", "aria-live": "polite" }, "asking …");
const running = el("div", { id: "running" });
const collected = el("div", { id: "collected" });

form.addEventListener("submit", (event) => {
  event.preventDefault();
  key = field.value;
  field.value = "";
  try {
    sessionStorage.setItem(STORED_KEY, key);
  } catch {
    // The key lasts as long as the page.
  }
  update();
});

const time = (seconds) => new Date(1000 * seconds).toLocaleTimeString();

function rolloutName(session) {
  const { group_index: group, index, rollout_id: id } = session.asked;
  const names = [group === null ? null : `group ${group}`, (id ?? index) === null ? null : `rollout ${id ?? index}`];
  return names.filter(Boolean).join(", ") || `session ${session.number}`;
}

function summary(session) {
  const turns = counted(session.turns, "turn");
  if (!session.asked) {
    return [
      el("strong", {}, `session ${session.number}`),
      ` since ${time(session.created_at)}, ${turns} `,
      session.in_flight ? el("span", { class: "badge speaks" }, `${session.in_flight} under way`) : null,
      session.metadata ? el("span", { class: "badge" }, session.metadata) : null,
    ];
  }
  const row = session.speaker;
  const speaks = row
    ? `row ${row.place} of ${session.num_rows} speaks with ${counted(row.trainable, "trainable token")}, reward ${reward(row)}`
    : "no rows";
  return [el("strong", {}, rolloutName(session)), ` ${turns} at ${time(session.at)}: ${speaks}`];
}

const reward = (row) => (typeof row.reward === "string" ? row.reward : number(row.reward));

function conversation(session, nodes, leaf) {
  const turns = [];
  for (let id = leaf.node_id; nodes.has(id); id = nodes.get(id).parent) turns.unshift(nodes.get(id));
  const name = `${session.number} ${leaf.node_id} ${leaf.row}`;
  const messages = () =>
    turns.flatMap((turn) => [
      turn.left_out ? el("p", { class: "note" }, `${counted(turn.left_out, "message")} left out`) : null,
      turn.messages.map((message) =>
        el("div", { class: "message" }, el("span", { class: "badge" }, message.role), el("pre", {}, message.text)),
      ),
      el(
        "p",
        { class: "note" },
        `turn ${turn.id}: ${whole(turn.prompt_tokens)} + ${counted(turn.completion_tokens, "token")}, ${turn.finish_reason}` +
          (turn.weight_version === null ? "" : `, weights ${turn.weight_version}`),
      ),
    ]);
  const inside = el("div", {});
  const details = el("details", {}, el("summary", {}, `conversation of ${counted(turns.length, "turn")}`), inside);
  details.addEventListener("toggle", () => {
    if (details.open) open.conversations.add(name);
    else open.conversations.delete(name);
    if (details.open && !inside.hasChildNodes()) filled(inside, {}, messages());
  });
  details.open = open.conversations.has(name);
  return details;
}

function leafCard(session, nodes, leaf) {
  const row = leaf.row === null ? null : session.rows[leaf.row];
  const head = row
    ? [
        el("strong", {}, `row ${leaf.row} `),
        row.speaks ? el("span", { class: "badge speaks" }, "mainstream row") : null,
        row.status === "completed" ? null : el("span", { class: "badge warn" }, row.status),
        el(
          "div",
          { class: "note" },
          `${whole(row.trainable)} of ${counted(row.response, "response token")} trained, ${whole(row.tokens)} in all; reward ${reward(row)}`,
        ),
      ]
    : session.rows
      ? el("span", { class: "badge warn" }, "no row: a later retry took its place, or it was too long")
      : null;
  return el("div", { class: "card", "data-node": leaf.node_id }, head, conversation(session, nodes, leaf));
}

function tree(session) {
  const nodes = new Map(session.tree.nodes.map((node) => [node.id, node]));
  const cut = session.turns - session.tree.nodes.length;
  return [
    cut > 0 ? el("p", { class: "note" }, `The latest ${whole(nodes.size)} of ${counted(session.turns, "turn")}.`) : null,
    nodes.size ? null : el("p", { class: "note" }, "No turn yet."),
    trajectoryTree(session.tree, (leaf) => leafCard(session, nodes, leaf)),
  ];
}

function newCard(number) {
  const card = { head: el("summary", {}), inside: el("div", {}), brief: "", shown: "" };
  card.element = el("details", { class: "session", "data-number": number }, card.head, card.inside);
  card.element.addEventListener("toggle", () => {
    if (card.element.open) open.sessions.add(number);
    else open.sessions.delete(number);
    fill(card, number).catch(trouble);
  });
  return card;
}

async function fill(card, number) {
  if (!open.sessions.has(number) || card.shown === card.brief) return;
  const wanted = card.brief;
  const session = await ask(`ui/data/${number}`);
  card.shown = wanted;
  card.inside.replaceChildren();
  filled(card.inside, {}, session ? [tree(session)] : [el("p", { class: "note" }, "It is gone.")]);
}

// Elements stay where they are while the list is the same, so that what has the focus keeps it.
function list(place, sessions, none) {
  const elements = sessions.map((session) => {
    if (!cards.has(session.number)) cards.set(session.number, newCard(session.number));
    const card = cards.get(session.number);
    const brief = JSON.stringify(session);
    if (brief !== card.brief) {
      card.brief = brief;
      card.head.replaceChildren();
      filled(card.head, {}, summary(session));
    }
    return card.element;
  });
  if (!elements.length) elements.push(el("p", { class: "note" }, none));
  const same = elements.length === place.children.length && elements.every((each, at) => each === place.children[at]);
  if (!same) place.replaceChildren(...elements);
}

function show(overview) {
  list(running, overview.running, "None.");
  list(collected, overview.collected, "None yet.");
  const shown = new Set([...overview.running, ...overview.collected].map((session) => session.number));
  for (const number of cards.keys()) if (!shown.has(number)) cards.delete(number);
  const left = overview.not_collected - overview.running.length;
  state.classList.remove("trouble");
  state.textContent =
    `${counted(overview.sessions, "session")}, ${counted(overview.turns, "turn")} in those not collected, ` +
    `${whole(overview.in_flight)} under way${left > 0 ? `; the ${overview.running.length} used last are shown` : ""}`;
}

function trouble(error) {
  const refused = error instanceof Refused;
  form.hidden = !refused;
  state.classList.add("trouble");
  state.textContent = refused ? "The server has another key." : `No answer (${error.message}); asking again.`;
  if (refused) {
    key = "";
    running.replaceChildren();
    collected.replaceChildren();
  }
}

async function update() {
  if (pageData.needs_key && !key) {
    form.hidden = false;
    if (!state.classList.contains("trouble")) state.textContent = "This server asks for its key.";
    return;
  }
  try {
    show(await ask("ui/data"));
    form.hidden = true;
    await Promise.all([...cards].map(([number, card]) => fill(card, number)));
  } catch (error) {
    trouble(error);
  }
}

async function poll() {
  if (!document.hidden) await update();
  setTimeout(poll, POLL_MS);
}

document
  .getElementById("page")
  .replaceChildren(
    el("header", {}, el("div", { class: "top" }, el("h1", {}, "Sessions"), themeButton()), state, form),
    el("section", {}, el("h2", {}, "Running"), running),
    el("section", {}, el("h2", {}, "Collected"), el("p", { class: "note" }, "The latest ones; which row speaks for each rollout."), collected),
    el("footer", { class: "note" }, `miles_norm ${pageData.version}`),
  );
poll();
