// Shows what the server tells. It asks for nothing but events, a group's facts and the ends of logs.
const STALE_MS = 40000;  // the server says something every 15 s
const token = new URLSearchParams(location.search).get("token");
const runs = [], byId = (id) => document.getElementById(id);
let lastHeard = 0;
window.sparePage = { drawMs: [] };  // from the arrival of an event until it was drawn, for tests

function address(path, words = {}) {
  const query = new URLSearchParams(token ? { ...words, token } : words).toString();
  return path + (query ? "?" + query : "");
}

function say(text, lost = false) {
  byId("state").textContent = text;
  byId("state").className = lost ? "lost" : "";
}

function take(event) {
  const began = performance.now(), news = JSON.parse(event.data);
  lastHeard = began;
  if (news.runs) {
    say("live");
    if (runs.map((run) => run.title).join() !== news.runs.join()) {
      runs.splice(0, runs.length, ...news.runs.map((name, number) => Object.assign(new Run(number, name), { title: name })));
      byId("runs").replaceChildren(...runs.map((run) => run.root));
      document.title = news.runs.join(", ");
    }
    return;
  }
  if (!("run" in news)) return;  // the server is there
  runs[news.run].take(news);
  requestAnimationFrame(() => setTimeout(() => {
    window.sparePage.drawMs.push(performance.now() - began);
    window.sparePage.drawMs.splice(0, window.sparePage.drawMs.length - 1000);
  }));
}

function listen() {
  const source = new EventSource(address("events"));
  lastHeard = performance.now();
  source.onmessage = take;
  const watching = setInterval(() => performance.now() - lastHeard > STALE_MS && again(0), 5000);
  const again = (pauseMs) => {
    say("no connection to spare-page; what is below is old", true);
    source.close();
    clearInterval(watching);
    setTimeout(listen, pauseMs);
  };
  source.onerror = async () => {
    again(2000);
    try {
      const answer = await fetch(address("metrics"));
      if (!answer.ok) say(await answer.text(), true);
    } catch { /* the server is not there */ }
  };
}

listen();
