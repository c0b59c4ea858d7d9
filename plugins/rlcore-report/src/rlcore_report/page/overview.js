pages.overview = {
  title: "Overview",
  render(data) {
    const several = data.runs.length > 1;
    return data.runs.flatMap((run, index) => [
      several && element("h2", {}, swatch(index), " ", run.name),
      tiles(run),
      remarks(run),
    ]).concat([mainCharts(data), several && settingsThatDiffer(data), ...data.runs.map(settings)]).filter(Boolean);
  },
};

const MAIN = ["reward/mean", "eval/pass_rate", "actor/entropy", "actor/kl_to_reference", "actor/kl_to_old", "response_length/mean",
  "actor/loss", "actor/rollout_logprob_gap"];

function swatch(index) {
  const made = element("span", {class: "swatch", "aria-hidden": "true"});
  made.style.background = `var(--run${index % 6})`;
  return made;
}

function tile(label, value, more = "") {
  return element("div", {class: "card"},
    element("div", {class: "muted small"}, label), element("div", {class: "value"}, value), element("div", {class: "muted small"}, more));
}

const short = (value) => value.toLocaleString("en", {maximumSignificantDigits: 3});

function tiles(run) {
  const change = (name) => {
    const values = known(run, name).map(([, value]) => value);
    return values.length ? [`${short(values[0])} → ${short(values.at(-1))}`, `best ${number(Math.max(...values))}`] : null;
  };
  const found = [tile("Steps", `${run.step} of ${run.total_steps ?? "?"}`, run.seconds == null ? "" : `${duration(run.seconds)} in steps`)];
  const reward = change("reward/mean"), rate = change("eval/pass_rate");
  if (reward) found.push(tile("Reward", ...reward));
  if (rate) found.push(tile("Held-out pass rate", ...rate));
  for (const [label, names] of Object.entries({Model: ["model.path"], Data: ["data.train"]})) {
    const value = names.map((name) => run.config[name]).find(Boolean);
    if (value) found.push(tile(label, String(value).split("/").at(-1), String(value).split("/").slice(-2, -1)));
  }
  const method = ["algorithm.name", "backend.name", "rollout.name"].map((name) => run.config[name] ?? run.config[name.split(".")[0]]);
  if (method.some(Boolean)) found.push(tile("Algorithm", method[0] ?? "–", `backend ${method[1] ?? "–"}, rollout ${method[2] ?? "–"}`));
  if (Object.keys(run.versions).length) {
    const [first, ...others] = Object.entries(run.versions).map(([name, version]) => `${name} ${version}`);
    found.push(tile("Versions", first, others.join(", ")));
  }
  return element("div", {class: "tiles"}, found);
}

function remarks(run) {
  const found = run.findings.map(({level, title, text, metric}) => element("li", {class: `card finding ${level}`},
    element("h3", {}, title), element("p", {}, prose(text)),
    metric && run.metrics[metric] ? element("a", {href: `#metrics/${metric}`}, `curve of ${metric}`) : null));
  const notes = run.notes.map((note) => element("li", {class: "muted small"}, note));
  return element("section", {}, element("h2", {}, "Warnings"),
    found.length ? element("ol", {class: "plain"}, found) : element("p", {class: "good"}, "Nothing looks wrong."),
    notes.length ? element("ul", {}, notes) : null);
}

function mainCharts(data) {
  const names = [...new Set([...data.runs.flatMap((run) => Object.keys(run.shows)), ...MAIN])].filter((name) => data.runs.some((run) => known(run, name).length));
  return element("section", {}, element("h2", {}, "Curves"), element("div", {class: "charts"}, names.slice(0, 6).map((name) => figure(data, name, 0.6))));
}

/** Return a chart of a metric with its explanation. */
function figure(data, name, weight) {
  const row = data.table[name];
  return element("figure", {class: "card", id: `metric/${name}`},
    element("figcaption", {}, element("h3", {}, name),
      row ? element("p", {class: "muted small"}, prose(row.meaning), element("br"), prose(`Healthy: ${row.healthy}`)) : null),
    metricChart(data, name, weight));
}

function settings(run) {
  const rows = Object.entries(run.config).map(([name, value]) => [element("code", {}, name), element("code", {}, JSON.stringify(value))]);
  return element("details", {}, element("summary", {}, `All settings of ${run.name}`), table(`Settings of ${run.name}`, ["setting", "value"], rows));
}

function settingsThatDiffer(data) {
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.config)))].sort();
  const rows = names.map((name) => [name, ...data.runs.map((run) => JSON.stringify(run.config[name]) ?? "–")]).filter(([, ...values]) => new Set(values).size > 1);
  return element("section", {}, element("h2", {}, "Settings that differ"), table("Settings that differ", ["setting", ...data.runs.map((run) => run.name)], rows));
}
