// Plots as inline SVG, drawn again when their width changes so that text keeps its size.

const PLOT = { left: 52, right: 14, top: 10, bottom: 38 };

// A place that calls draw(width) now and whenever its width changes.
function plotArea(draw) {
  const area = el("div", { class: "plot" });
  let drawn = 0;
  new ResizeObserver(() => {
    const width = Math.floor(area.clientWidth);
    if (width > 0 && width !== drawn) {
      drawn = width;
      area.replaceChildren(draw(width));
    }
  }).observe(area);
  return area;
}

function ticks(low, high, most) {
  const raw = (high - low) / Math.max(most, 1) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw) || 10 * power;
  const found = [];
  const first = Math.ceil(low / step);
  // Counted, because far from 0 adding 1 may change nothing.
  for (let count = 0; count <= 2 * most && (first + count) * step <= high + step * 1e-9; count += 1)
    found.push((first + count) * step);
  return found;
}

const tickText = (value) => minus(String(Number(value.toPrecision(6))));

function extent(values, ...also) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of [...also, ...values]) {
    if (value === null || value === undefined) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) return [0, 1];
  const spare = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
  return [low - spare, high + spare];
}

// Axes with names, ticks and a light grid; x(value) and y(value) give pixels.
function frame(width, height, xs, ys, names) {
  const inner = { right: width - PLOT.right, bottom: height - PLOT.bottom };
  const x = (value) => PLOT.left + ((value - xs[0]) / (xs[1] - xs[0])) * (inner.right - PLOT.left);
  const y = (value) => inner.bottom - ((value - ys[0]) / (ys[1] - ys[0])) * (inner.bottom - PLOT.top);
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": names.label });
  for (const tick of ticks(ys[0], ys[1], (inner.bottom - PLOT.top) / 32)) {
    root.append(
      svg("line", { class: "grid", x1: PLOT.left, x2: inner.right, y1: y(tick), y2: y(tick) }),
      svg("text", { class: "tick", x: PLOT.left - 6, y: y(tick) + 4, "text-anchor": "end" }, tickText(tick)),
    );
  }
  for (const tick of ticks(xs[0], xs[1], (inner.right - PLOT.left) / 56)) {
    if (names.whole && !Number.isInteger(tick)) continue;
    root.append(
      svg("line", { class: "grid", x1: x(tick), x2: x(tick), y1: PLOT.top, y2: inner.bottom }),
      svg("text", { class: "tick", x: x(tick), y: inner.bottom + 16, "text-anchor": "middle" }, tickText(tick)),
    );
  }
  root.append(
    svg("text", { class: "axis", x: (PLOT.left + inner.right) / 2, y: height - 4, "text-anchor": "middle" }, names.x),
  );
  if (names.y)
    root.append(
      svg(
        "text",
        {
          class: "axis",
          x: 12,
          y: PLOT.top + 2,
          transform: `rotate(-90 12 ${(PLOT.top + inner.bottom) / 2})`,
          "text-anchor": "middle",
          dy: (inner.bottom - PLOT.top) / 2,
        },
        names.y,
      ),
    );
  return { root, x, y, inner };
}

// series: [{name, values, color}]; at: the x of each value; reading(index) gives the lines that a hover shows.
function lineChart(width, at, series, names) {
  const height = 180;
  const values = series.flatMap((one) => one.values);
  const [low, high] = names.from === undefined ? extent(values) : [names.from, extent(values, names.from)[1]];
  const { root, x, y, inner } = frame(
    width,
    height,
    at.length > 1 ? [at[0], at[at.length - 1]] : [at[0] - 1, at[0] + 1],
    [low, high],
    { ...names, whole: true },
  );
  for (const one of series) {
    let path = "";
    let pen = "M";
    one.values.forEach((value, index) => {
      if (value === null) pen = "M";
      else {
        path += `${pen}${x(at[index]).toFixed(1)} ${y(value).toFixed(1)}`;
        pen = "L";
      }
    });
    root.append(
      svg("path", {
        class: "curve",
        d: path,
        stroke: `var(--${one.color})`,
        "stroke-dasharray": one.dashed ? "5 3" : null,
      }),
    );
  }
  const guide = svg("line", { class: "guide", y1: PLOT.top, y2: inner.bottom, visibility: "hidden" });
  root.append(guide);
  root.addEventListener("pointermove", (event) => {
    const pixel = event.clientX - root.getBoundingClientRect().left;
    let nearest = 0;
    at.forEach((value, index) => {
      if (Math.abs(x(value) - pixel) < Math.abs(x(at[nearest]) - pixel)) nearest = index;
    });
    guide.setAttribute("x1", x(at[nearest]));
    guide.setAttribute("x2", x(at[nearest]));
    guide.setAttribute("visibility", "visible");
    names.reading(nearest);
  });
  root.addEventListener("pointerleave", () => {
    guide.setAttribute("visibility", "hidden");
    names.reading(null);
  });
  return root;
}

// points: [{x, y, kind, text, open}]; kinds are classes; lines: [{from: [x, y], to: [x, y], text, at, anchor}] in data units.
function scatter(width, points, names, lines) {
  const height = Math.min(360, Math.max(260, Math.round(width * 0.62)));
  const xs = extent(
    points.map((point) => point.x),
    ...(names.alsoX || []),
  );
  const ys = extent(
    points.map((point) => point.y),
    ...(names.alsoY || []),
  );
  const { root, x, y } = frame(width, height, xs, ys, names);
  const references = lines(xs, ys);
  for (const line of references) {
    root.append(
      svg("line", {
        class: "reference",
        x1: x(line.from[0]),
        y1: y(line.from[1]),
        x2: x(line.to[0]),
        y2: y(line.to[1]),
      }),
    );
  }
  const size = points.length > 400 ? 2.5 : 4;
  for (const point of points) {
    if (point.x === null || point.y === null) continue;
    const [px, py] = [x(point.x).toFixed(1), y(point.y).toFixed(1)];
    const shape =
      point.kind === "flip"
        ? svg("path", { class: "dot flip", d: `M${px - 4} ${py - 4}l8 8m0 -8l-8 8` })
        : svg("circle", { class: `dot ${point.kind}`, cx: px, cy: py, r: size });
    shape.append(svg("title", {}, point.text));
    shape.addEventListener("click", point.open);
    root.append(shape);
  }
  for (const line of references.filter((each) => each.text)) {
    root.append(
      svg(
        "text",
        { class: "tick halo", x: x(line.at[0]), y: y(line.at[1]) + 16, "text-anchor": line.anchor },
        line.text,
      ),
    );
  }
  return root;
}
