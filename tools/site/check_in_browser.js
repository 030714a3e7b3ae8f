// Runs beside the frames and writes to "report" what is too wide for its frame and which text has little contrast.
const problems = [];

function examine(frame) {
  const page = frame.contentDocument, view = frame.contentWindow;
  const report = (text) => problems.push(`${frame.clientWidth} px, ${frame.dataset.palette}: ${text}`);
  function color(text) { // [red, green, blue, alpha] of a computed color
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = canvas.getImageData(0, 0, 1, 1).data;
    return [red, green, blue, alpha / 255];
  }
  const cache = new Map();
  const colorOf = (text) => cache.get(text) || cache.set(text, color(text)).get(text);
  const over = (front, back) => [0, 1, 2].map((i) => front[i] * front[3] + back[i] * (1 - front[3]));
  function ground(element) {
    const layers = [];
    for (let one = element; one; one = one.parentElement) layers.push(colorOf(view.getComputedStyle(one).backgroundColor));
    return layers.reverse().reduce((back, layer) => over(layer, back), [255, 255, 255]);
  }
  function luminance(rgb) {
    const [red, green, blue] = rgb.map((value) => {
      const share = value / 255;
      return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  }
  function opacity(element) {
    let value = 1;
    for (let one = element; one; one = one.parentElement) value *= parseFloat(view.getComputedStyle(one).opacity);
    return value;
  }
  function scrolls(element) { // whether a box around it scrolls or hides what is too wide
    for (let one = element.parentElement; one && one !== page.body; one = one.parentElement)
      if (view.getComputedStyle(one).overflowX !== "visible") return true;
    return false;
  }
  const label = (element) => `${element.tagName.toLowerCase()}.${element.className} "${element.textContent.trim().slice(0, 40)}"`;

  const width = page.documentElement.clientWidth;
  if (page.documentElement.scrollWidth > width) report(`${page.documentElement.scrollWidth} px wide`);
  const reported = new Set();
  for (const element of page.querySelectorAll(".md-content *, .md-header *, .md-tabs *, .md-footer *, .md-sidebar *")) {
    const box = element.getBoundingClientRect(), style = view.getComputedStyle(element);
    if (!box.width || !box.height || style.visibility === "hidden") continue;
    if (element.closest(".md-content") && box.right > width + 1 && !scrolls(element)) report(`too wide: ${label(element)}`);
    const text = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!text || box.right < 0 || box.left > width) continue;
    const shown = opacity(element);
    if (shown < 0.1) continue; // appears when the pointer is near
    const back = ground(element), front = colorOf(style.color);
    const seen = over([...front.slice(0, 3), front[3] * shown], back);
    const [high, low] = [luminance(seen), luminance(back)].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05), size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && parseInt(style.fontWeight) >= 700);
    const kind = `${element.tagName}.${element.className}|${style.color}|${back}`;
    if (ratio < (large ? 3 : 4.5) && !reported.has(kind)) {
      reported.add(kind);
      report(`contrast ${ratio.toFixed(2)}: ${label(element)}`);
    }
  }
}

function begin(frame) {
  const page = frame.contentDocument, style = page.createElement("style");
  style.textContent = "* { transition: none !important; animation: none !important }";
  page.head.append(style);
  page.body.setAttribute("data-md-color-scheme", frame.dataset.scheme);
}

addEventListener("load", () => { // when all frames are loaded
  const frames = [...document.querySelectorAll("iframe")];
  frames.forEach(begin);
  setTimeout(() => {
    frames.forEach(examine);
    document.getElementById("report").textContent = JSON.stringify(problems);
  }, 1500);
});
