// The page as a whole: header, pages by the part of the address after #, theme, keyboard, refresh.

const view = {metric: "", smoothing: 0.6, samples: {}}; // what the user has chosen; survives a refresh
const LIVE = document.documentElement.dataset.live; // address of the data of a run that is watched
const REFRESH_MS = 3000;
let data = null;

function theme(wanted) {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = wanted ?? document.documentElement.dataset.theme ?? system;
  drawn.forEach((place) => place.redraw());
}

function header() {
  const other = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  const [first] = data.runs;
  const title = data.runs.length > 1 ? `${data.runs.length} runs` : first.name;
  const badges = data.runs.length > 1 ? [] : [element("span", {class: `badge ${first.state}`, role: "status"}, first.state)];
  document.getElementById("header").replaceChildren(
    element("h1", {}, title), ...badges, element("span", {class: "grow"}),
    element("span", {class: "muted small"}, LIVE ? "refreshed every few seconds" : `written ${data.made}`),
    element("button", {onclick: () => { theme(other); header(); }, "aria-label": `Use the ${other} theme`}, other === "dark" ? "Dark" : "Light"));
}

function route() {
  const [name, ...rest] = decodeURIComponent(location.hash.slice(1)).split("/");
  return [name in pages ? name : "overview", rest.join("/")];
}

function show() {
  data.runs.forEach((run) => { run.several = data.runs.length > 1; });
  const [name, rest] = route();
  clearCharts();
  document.getElementById("nav").replaceChildren(...Object.entries(pages).map(([key, {title}]) => element("a", {href: `#${key}`, "aria-current": key === name ? "page" : null}, title)));
  document.getElementById("main").replaceChildren(...pages[name].render(data, rest));
  header();
}

function keyboard(event) {
  if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  const number = Number(event.key);
  if (number >= 1 && number <= Object.keys(pages).length) location.hash = Object.keys(pages)[number - 1];
  else if (event.key === "/") document.querySelector("input[type=search]")?.focus(), event.preventDefault();
}

/** Tell whether a refresh would disturb the user: who types, compares samples, or reads far down a list. */
function isBusy() {
  const reads = route()[0] === "samples" && scrollY > 300;
  return reads || document.activeElement?.matches("input, select") || document.querySelector("dialog[open]");
}

/** Refresh the data of a watched run. */
async function refresh() {
  try {
    const answer = await fetch(LIVE);
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const newer = await unpack(answer.body);
    if (newer.key !== data?.key && !(data && isBusy())) {
      const place = scrollY;
      data = newer;
      show();
      scrollTo(0, place);
    }
  } catch (error) {
    document.getElementById("header").append(element("span", {class: "badge bad", role: "alert"}, `no longer watching: ${error.message}`));
    return;
  }
  setTimeout(refresh, REFRESH_MS);
}

async function start() {
  theme();
  addEventListener("hashchange", () => { show(); document.getElementById("main").focus({preventScroll: true}); scrollTo(0, 0); });
  addEventListener("keydown", keyboard);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => { theme(event.matches ? "dark" : "light"); header(); });
  if (LIVE) return refresh();
  data = await unpack(embedded());
  show();
}

start().catch((error) => document.getElementById("main").replaceChildren(element("p", {class: "bad"}, `This page cannot be drawn: ${error.message}`)));
