"use strict";
// Small plots of the steps: a line from left to right, the largest and smallest value beside it, failures as marks.
const WIDTH = 600, HEIGHT = 84;

function makePlot(name) {
  const figure = document.createElement("figure");
  figure.innerHTML =
    `<figcaption><span></span><span></span></figcaption><svg viewBox="0 0 ${WIDTH} ${HEIGHT}" preserveAspectRatio="none" ` +
    'role="img"><path class="marks"/><path class="line"/></svg>';
  figure.querySelector("span").textContent = name;
  figure.querySelector("svg").setAttribute("aria-label", name);
  return figure;
}

const short = (value) => (Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(1) : +value.toPrecision(4));

// points: [x, y] with y null where there is none; marks: x of vertical lines; zero: whether the axis begins at 0.
function drawPlot(figure, points, marks, { zero, steps, unit }) {
  const there = points.filter((point) => point[1] !== null);
  figure.hidden = there.length < 2;
  if (figure.hidden) return;
  let low = zero ? 0 : Infinity, high = -Infinity;
  for (const [, y] of there) { low = Math.min(low, y); high = Math.max(high, y); }
  const said = `${short(low)} to ${short(high)}${unit || ""}`;
  if (low === high) [low, high] = [low - 1, high + 1];
  const left = there[0][0], wide = there[there.length - 1][0] - left || 1, tall = high - low;
  const x = (value) => ((value - left) / wide * WIDTH).toFixed(1);
  const y = (value) => (HEIGHT - 3 - (value - low) / tall * (HEIGHT - 6)).toFixed(1);
  let line = "", back = -Infinity;
  for (const [at, value] of there) {
    if (at < back || !line) line += `M${x(at)} ${y(value)}`;  // a later life goes back to the step of its checkpoint
    else line += steps ? `H${x(at)}V${y(value)}` : `L${x(at)} ${y(value)}`;
    back = at;
  }
  figure.querySelector(".line").setAttribute("d", line);
  const shown = marks.filter((mark) => mark >= left);
  figure.querySelector(".marks").setAttribute("d", shown.map((mark) => `M${x(mark)} 0V${HEIGHT}`).join(""));
  figure.querySelectorAll("span")[1].textContent = said;
}
