// Elements and texts. All text goes into text nodes: nothing of the data is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) {
      element.append(child instanceof Node ? child : String(child));
    }
  }
  return element;
}

const el = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

// Digits as the command line prints them: 0 is exactly 0, and whatever is smaller than 0.001 has an exponent.
function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e4) return minus(String(Number(value.toPrecision(5))));
  return minus(size >= 1e-3 ? value.toFixed(4) : value.toExponential(2));
}

const whole = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en-US"));
const minus = (text) => text.replaceAll("-", "−");
const percent = (share) =>
  share === null || share === undefined ? "–" : `${(100 * share).toFixed(share && share < 0.1 ? 1 : 0)}%`;
const counted = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
const range = (pair, text = number) =>
  !pair ? "–" : pair[0] === pair[1] ? text(pair[0]) : `${text(pair[0])} to ${text(pair[1])}`;

// The theme: what the system has until the button is pressed. Storage may be closed to a page from disk.
const THEMES = ["auto", "light", "dark"];

function storedTheme() {
  try {
    const theme = localStorage.getItem("miles_norm theme");
    return THEMES.includes(theme) ? theme : "auto";
  } catch {
    return "auto";
  }
}

function themeButton() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let theme = storedTheme();
  const button = el("button", { type: "button", id: "theme" });
  const show = () => {
    document.documentElement.dataset.theme = theme === "auto" ? (dark.matches ? "dark" : "light") : theme;
    button.textContent = `Theme: ${theme}`;
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    try {
      localStorage.setItem("miles_norm theme", theme);
    } catch {
      // The choice lasts as long as the page.
    }
    show();
  });
  dark.addEventListener("change", show);
  show();
  return button;
}
