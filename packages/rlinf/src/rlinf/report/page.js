// Hover text of the report: spans of the timeline carry data-tip, curves their points.
(() => {
  const tip = document.getElementById("tip");
  const show = (event, lines) => {
    tip.replaceChildren(...lines.map((text) => Object.assign(document.createElement("div"), { textContent: text })));
    tip.hidden = false;
    const right = event.clientX + 14 + tip.offsetWidth > document.documentElement.clientWidth;
    tip.style.left = `${event.clientX + (right ? -tip.offsetWidth - 10 : 14)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, document.documentElement.clientHeight - tip.offsetHeight - 6)}px`;
  };

  for (const svg of document.querySelectorAll("svg[data-timeline]")) {
    svg.addEventListener("mousemove", (event) => {
      const text = event.target.getAttribute("data-tip");
      if (text) show(event, text.split("\n"));
      else tip.hidden = true;
    });
    svg.addEventListener("mouseleave", () => (tip.hidden = true));
  }

  for (const svg of document.querySelectorAll("svg[data-curve]")) {
    const curve = JSON.parse(svg.dataset.curve);
    const cursor = svg.querySelector(".cursor");
    const add = (name, attributes) => {
      const node = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
      cursor.append(node);
    };
    svg.addEventListener("mousemove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      const nearest = curve.lines.map((line) =>
        line.points.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best)),
      );
      cursor.replaceChildren();
      const closest = nearest.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best));
      add("line", { x1: closest[0], x2: closest[0], y1: curve.top, y2: curve.bottom, class: "axis" });
      nearest.forEach((point, i) => add("circle", { cx: point[0], cy: point[1], r: 3.5, fill: curve.lines[i].color }));
      show(event, nearest.map((point, i) => `after ${point[2]} steps  ${curve.lines[i].label}  ${point[3]}`));
    });
    svg.addEventListener("mouseleave", () => {
      cursor.replaceChildren();
      tip.hidden = true;
    });
  }
})();
