"""What no page may show, as text in the data and as scripts that find it."""

HOSTILE = '</script><img src=x onerror="alert(1)"><b>bold</b>'

OUTSIDE = """() => [...document.querySelectorAll("main *")].filter((each) => {
  const box = each.getBoundingClientRect();
  return box.width && (box.right > innerWidth + 1 || box.left < -1) && !each.closest("svg") && !each.closest(".scroll");
}).map((each) => each.outerHTML.slice(0, 80))"""
SMALL = """() => [...document.querySelectorAll("main *")].filter((each) => each.checkVisibility() &&
  [...each.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim()) &&
  parseFloat(getComputedStyle(each).fontSize) < 12).map((each) => each.outerHTML.slice(0, 80))"""
