// The tree of a rollout: turns that follow each other without a branch stand on one line, leaves hang where they end.

// tree is {nodes: [{id, parent}], leaves: [{node_id, ...}]} as a session's metadata has it; leafContent(leaf) gives what
// is shown of a leaf. A leaf without a node hangs at the top. Nodes stand in the order of their first leaf.
function trajectoryTree(tree, leafContent) {
  const children = new Map([[null, []]]);
  const known = new Set(tree.nodes.map((node) => node.id));
  for (const node of tree.nodes) {
    const parent = known.has(node.parent) ? node.parent : null;
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(node.id);
  }
  const leaves = new Map();
  for (const leaf of tree.leaves) {
    const node = known.has(leaf.node_id) ? leaf.node_id : null;
    if (!leaves.has(node)) leaves.set(node, []);
    leaves.get(node).push(leaf);
  }
  const leafItem = (leaf) => el("li", { class: "leaf" }, leafContent(leaf));
  const branch = (start) => {
    const run = [start];
    let node = start;
    while (!leaves.has(node) && (children.get(node) || []).length === 1) {
      [node] = children.get(node);
      run.push(node);
    }
    const turns = `${run.length === 1 ? "turn" : "turns"} ${run.join(" → ")}`;
    const below = [...(leaves.get(node) || []).map(leafItem), ...(children.get(node) || []).map(branch)];
    return el("li", {}, el("span", { class: "turns" }, turns), below.length ? el("ul", {}, below) : null);
  };
  return el("ul", { class: "tree" }, children.get(null).map(branch), (leaves.get(null) || []).map(leafItem));
}

// Lines of an explanation: [what it is about, what it says].
const explained = (lines) =>
  el(
    "dl",
    { class: "explanation" },
    lines.map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]),
  );

// A loss mask as a strip: one digit per part of the response, 0 none of its tokens trainable to 9 all of them.
function maskStrip(digits, label) {
  const strip = svg("svg", {
    class: "strip",
    viewBox: `0 0 ${Math.max(digits.length, 1)} 1`,
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": label,
  });
  for (let from = 0; from < digits.length;) {
    let to = from + 1;
    while (to < digits.length && digits[to] === digits[from]) to += 1;
    const share = Number(digits[from]) / 9;
    const part = { x: from, y: 0, width: to - from, height: 1 };
    strip.append(svg("rect", { ...part, class: "untrained" }));
    if (share > 0)
      strip.append(svg("rect", { ...part, class: "trained", "fill-opacity": Math.max(share, 0.25).toFixed(2) }));
    from = to;
  }
  return strip;
}
