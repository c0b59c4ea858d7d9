"use strict";
// Shared by all pages. Text of a run reaches the page through `element` only, as text nodes, never as markup.

const pages = {}; // name -> {title, render(data) -> elements}

/** Create an element: element("p", {class: "muted", onclick: f}, "text", other). */
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child != null).map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

/** Return text in which `words` in backticks are code. */
function prose(text) {
  return text.split("`").map((part, i) => (i % 2 ? element("code", {}, part) : part));
}

/** Format a number with four significant digits; null is a dash. */
function number(value) {
  if (value == null) return "–";
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-4)) return value.toExponential(2);
  return value.toLocaleString("en", {maximumSignificantDigits: 4});
}

/** Format seconds: 75 -> "1 m 15 s". */
function duration(seconds) {
  if (seconds == null) return "–";
  const [h, m, s] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.round(seconds % 60)];
  return h ? `${h} h ${m} m` : m ? `${m} m ${s} s` : `${number(seconds)} s`;
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function runColor(index) {
  return color(`--run${index % 6}`);
}

/** Return the values of a metric that are known, as [step, value] pairs. */
function known(run, name) {
  return run.steps.map((step, i) => [step, (run.metrics[name] ?? [])[i]]).filter(([, value]) => value != null);
}

/** Make a table: rows are arrays; columns whose header begins with "#" are numbers. */
function table(caption, headers, rows) {
  const kind = headers.map((header) => (header.startsWith("#") ? "number" : null));
  const head = headers.map((header, i) => element("th", {scope: "col", class: kind[i]}, header.replace("#", "")));
  const body = rows.map((row) => element("tr", {}, row.map((cell, i) => element("td", {class: kind[i]}, cell))));
  return element("div", {class: "scroll"},
    element("table", {"aria-label": caption}, element("thead", {}, element("tr", {}, head)), element("tbody", {}, body)));
}

/** Explain colors: [[color, text], …]. */
function legend(entries) {
  return element("ul", {class: "legend small", "aria-label": "Legend"}, entries.map(([color, text]) => {
    const mark = element("span", {class: "swatch", "aria-hidden": "true"});
    mark.style.background = color;
    return element("li", {}, mark, text);
  }));
}

/** Decode the gzipped JSON of the page, or of a server that watches a run. */
async function unpack(stream) {
  return JSON.parse(await new Response(stream.pipeThrough(new DecompressionStream("gzip"))).text());
}

function embedded() {
  const text = atob(document.getElementById("data").textContent);
  return new Blob([Uint8Array.from(text, (c) => c.charCodeAt(0))]).stream();
}
