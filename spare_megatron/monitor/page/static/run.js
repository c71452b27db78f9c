// One run as the page shows it.
const STATES = ["live", "patching", "learning", "dead", "starting"];
const SLOW = 0.75;  // groups below it are marked
const FOLLOW_MS = 2000;  // an open log is read again so often

function element(kind, text = "", name = "") {
  const made = document.createElement(kind);
  made.textContent = text;
  made.className = name;
  return made;
}

class Run {
  constructor(number, name) {
    this.number = number;
    this.root = byId("run").content.firstElementChild.cloneNode(true);
    this.find = (name) => this.root.querySelector(name);
    this.find(".name").textContent = name;
    this.plots = ["loss", "step time", "live groups"].map(makePlot);
    this.find(".plots").append(...this.plots);
    this.grid = this.find(".cells");
    this.grid.onclick = (event) => event.target.tagName === "I" && this.open(+event.target.dataset.group);
    this.grid.onkeydown = (event) => this.key(event);
    this.at = 0;
    this.clear();
  }

  clear() {
    Object.assign(this, { head: { facts: [], lines: [] }, cells: [], parts: [], told: [], points: [] });
  }

  take(news) {
    if (news.whole) this.clear();
    for (const name of ["head", "parts"]) if (name in news) this[name] = news[name];
    if ("groups" in news) this.resize(news.groups);
    for (const [group, cell] of Object.entries(news.cells || {})) this.cell(+group, cell);
    for (const name of ["told", "points"])
      if (name in news) this[name] = this[name].slice(0, news[name].from).concat(news[name].list);
    if ("head" in news || news.whole) this.drawHead();
    if ("cells" in news || news.whole) this.drawLegend();
    if ("parts" in news || news.whole) this.drawParts();
    if ("told" in news || news.whole) this.drawTold();
    if ("points" in news || news.whole) this.drawPlots();
    if (this.opened !== undefined && "cells" in news && this.opened in news.cells) this.open(this.opened, false);
  }

  resize(groups) {
    this.grid.replaceChildren();
    this.grid.className = "cells" + (groups > 200 ? " crowd" : groups > 48 ? " many" : "");
    for (let group = 0; group < groups; group++) {
      const made = element("i", String(group));
      made.dataset.group = group;
      made.id = `run-${this.number}-group-${group}`;
      made.setAttribute("role", "option");
      this.grid.append(made);
    }
    this.cells = new Array(groups).fill(["starting", 0, -1, "", 0]);
  }

  cell(group, cell) {
    const made = this.grid.children[group], [state, load, , , speed] = cell, slow = speed > 0 && speed < SLOW;
    this.cells[group] = cell;
    made.className = state + (slow ? " slow" : "") + (group === this.at && this.moved ? " at" : "");
    made.dataset.load = state === "live" || state === "patching" ? load + (slow ? `·${speed}×` : "") : "";
    made.setAttribute("aria-label", this.says(group));
    made.title = this.says(group);
  }

  says(group) {
    const [state, load, incarnation, note, speed] = this.cells[group];
    const more = note || (load ? `${load} piece${load === 1 ? "" : "s"} in the step in flight` : "");
    return `group ${group}: ${state}${more ? ", " + more : ""}${incarnation > 0 ? `, incarnation ${incarnation}` : ""}${speed ? `, ${speed}× the median speed` : ""}`;
  }

  key(event) {
    const across = Math.max(1, getComputedStyle(this.grid).gridTemplateColumns.split(" ").length);
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across, Home: -1e9, End: 1e9 }[event.key];
    if (event.key === "Enter" || event.key === " ") this.open(this.at);
    else if (by === undefined) return;
    else this.move(Math.min(this.cells.length - 1, Math.max(0, this.at + by)));
    event.preventDefault();
  }

  move(group) {
    this.grid.children[this.at]?.classList.remove("at");
    this.at = group;
    this.moved = true;
    const made = this.grid.children[group];
    made.classList.add("at");
    made.scrollIntoView({ block: "nearest" });
    this.grid.setAttribute("aria-activedescendant", made.id);
  }

  drawHead() {
    const head = this.head;
    this.root.className = "run " + (head.tone || "");
    this.find(".phase").textContent = head.phase || "";
    this.find(".progress span").style.transform = `scaleX(${head.share || 0})`;
    this.find(".facts").replaceChildren(...head.facts.map(([name, value]) => {
      const fact = element("div");
      fact.append(element("dt", name), element("dd", value));
      return fact;
    }));
    this.find(".lines").replaceChildren(...head.lines.map((line) => element("li", line)));
    this.find(".effective").textContent = head.effective || "where the time went: no step yet";
    this.find(".began").textContent = head.began || "";
    if (!this.find(".joblogs").childElementCount) this.find(".joblogs").append(this.button("logs of the job", () => this.openJob()));
  }

  drawLegend() {
    const counts = Object.fromEntries(STATES.map((state) => [state, 0]));
    for (const cell of this.cells) counts[cell[0]]++;
    this.find(".legend").replaceChildren(...STATES.filter((state) => state !== "starting" || counts[state]).map((state) => {
      const item = element("li");
      item.append(element("span", "", "key " + state), `${counts[state]} ${state}`);
      return item;
    }));
    const slow = this.grid.querySelectorAll(".slow").length;
    if (slow) {
      const item = element("li");
      item.append(element("span", "", "key live slow"), `${slow} slow (below ${SLOW}× the median speed)`);
      this.find(".legend").append(item);
    }
  }

  drawParts() {
    this.find(".bar").replaceChildren(...this.parts.map(([part, name, , share]) => {
      const piece = element("span", "", "part-" + part);
      piece.style.width = 100 * share + "%";
      piece.title = name;
      return piece;
    }));
    this.find(".parts").replaceChildren(...this.parts.map(([part, name, took]) => {
      const item = element("li");
      item.append(element("span", "", "key part-" + part), name, element("b", took));
      return item;
    }));
  }

  drawTold() {
    this.find(".told").replaceChildren(...this.told.slice().reverse().map((one) => {
      const item = element("li", "", one.kind + (one.masked === false ? " fatal" : ""));
      item.append(element("time", one.clock), one.text);
      if (one.why && one.why !== one.text) item.append(element("small", one.why));
      if (one.kind === "failure")
        item.append(element("small", [one.cost && "cost: " + one.cost, "back: " + one.back].filter(Boolean).join("; ")));
      return item;
    }));
  }

  drawPlots() {
    const marks = this.head.marks || [], at = (value) => this.points.map((point) => [point[1], point[value]]);
    drawPlot(this.plots[0], this.points.map((point) => [point[0], point[4]]), [], { zero: false });
    drawPlot(this.plots[1], at(2), marks, { zero: true, unit: " s" });
    drawPlot(this.plots[2], at(3), marks, { zero: false, steps: true });
  }

  button(text, then) {
    const made = element("button", text);
    made.type = "button";
    made.onclick = then;
    return made;
  }

  async open(group, moves = true) {
    this.opened = group;
    if (moves) this.move(group);
    let found;
    try {
      found = await (await fetch(address(`runs/${this.number}/groups/${group}`))).json();
    } catch {
      found = { ranks: [], logs: [] };
    }
    if (this.opened !== group) return;
    const ranks = found.ranks.map((rank) => `rank ${rank.position}: pid ${rank.pid} on ${rank.host}`);
    const lost = this.told.filter((one) => (one.groups || []).includes(group)).slice(-3);
    this.fill(this.says(group), [ranks.join("; ") || "no process is listed", ...lost.map((one) => `${one.clock}: ${one.text}`)],
      found.logs.map((name) => [name, { group, name }]), moves);
  }

  async openJob() {
    this.opened = undefined;
    const found = await (await fetch(address(`runs/${this.number}/groups/0`))).json();
    this.fill("logs of the job", [], found.job_logs.map((name) => [name, { name }]), true);
  }

  fill(title, lines, logs, moves) {
    const detail = this.find(".detail"), before = detail.querySelector("pre"), head = element("h4", title);
    const was = before && !moves ? before.dataset.log : "";
    head.append(this.button("close", () => this.close()));
    const text = element("pre");
    text.hidden = true;
    text.tabIndex = 0;
    const buttons = logs.map(([name, words]) => {
      const made = this.button(name, () => this.log(text, words, buttons, made));
      made.setAttribute("aria-pressed", "false");
      if (was === name) queueMicrotask(made.onclick);
      return made;
    });
    detail.replaceChildren(head, ...lines.map((line) => element("p", line)), ...buttons, text);
    detail.hidden = false;
    detail.onkeydown = (event) => event.key === "Escape" && this.close();
    if (moves) detail.focus({ preventScroll: true });
    if (moves) detail.scrollIntoView({ block: "nearest" });
  }

  async log(text, words, buttons, button) {
    for (const one of buttons) one.setAttribute("aria-pressed", String(one === button));
    let found;
    try {
      found = (await (await fetch(address(`runs/${this.number}/logs`, words))).text()) || "(empty)";
    } catch {
      found = text.textContent;  // the server is not there now
    }
    if (button.getAttribute("aria-pressed") !== "true" || !text.isConnected || this.find(".detail").hidden) return;
    const atEnd = text.hidden || text.dataset.log !== words.name || text.scrollTop + text.clientHeight > text.scrollHeight - 30;
    if (text.textContent !== found) text.textContent = found;
    text.dataset.log = words.name;
    text.hidden = false;
    if (atEnd) text.scrollTop = text.scrollHeight;
    clearTimeout(this.following);
    this.following = setTimeout(() => this.log(text, words, buttons, button), FOLLOW_MS);
  }

  close() {
    this.opened = undefined;
    this.find(".detail").hidden = true;
    this.grid.focus();
  }
}

