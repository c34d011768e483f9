// Runs in a page, and returns what a reader would stumble over, a line for each.
() => {
  const MIN_SIZE = 9, MIN_TEXT_CONTRAST = 4.5, MIN_MARK_CONTRAST = 3;
  const problems = [];
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width)
    problems.push(`the page is ${document.documentElement.scrollWidth} pixels wide in a window of ${width}`);

  const luminance = (color) => {
    const parts = color.match(/[\d.]+/g).slice(0, 3).map((part) => part / 255);
    const [red, green, blue] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const contrast = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const background = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (!/^rgba\(.*, 0\)$|^transparent$/.test(color)) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const inside = (box, frame) => ({
    left: Math.max(box.left, frame.left), right: Math.min(box.right, frame.right),
    top: Math.max(box.top, frame.top), bottom: Math.min(box.bottom, frame.bottom),
  });

  const boxes = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement, text = node.textContent.trim();
    if (!text || !element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
    const svg = element.closest("svg"), style = getComputedStyle(element);
    const matrix = svg ? element.getScreenCTM() : { a: 1, b: 0 };
    const size = parseFloat(style.fontSize) * Math.hypot(matrix.a, matrix.b);
    if (size < MIN_SIZE) problems.push(`"${text}" is ${size.toFixed(1)} pixels high`);
    const ratio = contrast(svg ? style.fill : style.color, background(element));
    if (ratio < MIN_TEXT_CONTRAST) problems.push(`"${text}" has a contrast of ${ratio.toFixed(1)}`);
    const range = document.createRange();
    range.selectNodeContents(node);
    for (let box of svg ? [element.getBoundingClientRect()] : range.getClientRects()) {
      const scroll = element.closest(".scroll");
      if (scroll) box = inside(box, scroll.getBoundingClientRect());
      if (box.right - box.left < 2 || box.bottom - box.top < 2) continue;
      if (box.left < -0.5 || box.right > width + 0.5) problems.push(`"${text}" leaves the window`);
      if (svg) {
        const frame = svg.getBoundingClientRect(), seen = inside(box, frame);
        if (Math.abs(seen.left - box.left) + Math.abs(seen.right - box.right) > 0.5
            || Math.abs(seen.top - box.top) + Math.abs(seen.bottom - box.bottom) > 0.5)
          problems.push(`"${text}" is cut off by its picture`);
      }
      boxes.push({ text, box });
    }
  }
  boxes.sort((one, other) => one.box.top - other.box.top);
  boxes.forEach(({ text, box }, index) => {
    for (let next = index + 1; next < boxes.length && boxes[next].box.top < box.bottom - 1; next++) {
      const shared = inside(box, boxes[next].box);
      if (shared.right - shared.left > 1 && shared.bottom - shared.top > 1)
        problems.push(`"${text}" overlaps "${boxes[next].text}"`);
    }
  });

  const root = getComputedStyle(document.documentElement);
  const painted = document.createElement("i");
  document.body.append(painted);
  for (const name of ["full", "piecewise", "none", "ink", "teal", "violet"]) {
    painted.style.color = root.getPropertyValue(`--${name}`);
    const ratio = contrast(getComputedStyle(painted).color, background(document.body));
    if (!(ratio >= MIN_MARK_CONTRAST)) problems.push(`marks in ${name} have a contrast of ${ratio.toFixed(1)}`);
  }
  painted.remove();

  for (const svg of document.querySelectorAll("svg")) {
    const figure = svg.closest("figure"), title = figure?.querySelector("figcaption")?.textContent.trim();
    if (!title) problems.push("a picture has no title");
    for (const axis of ["x", "y"])
      if (!/\([^()]+\)$/.test(svg.querySelector(`[id$="-${axis}-label"]`)?.textContent.trim() ?? ""))
        problems.push(`"${title}" has no unit on its ${axis} axis`);
    if (!(figure?.querySelectorAll("details table tbody tr").length > 0)) problems.push(`"${title}" has no table`);
  }
  return problems;
}
