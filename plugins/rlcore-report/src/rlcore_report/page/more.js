pages.distributions = {
  title: "Distributions",
  render(data) {
    const figures = data.runs.flatMap((run) => Object.entries(run.distributions).map(([name, found]) => element("figure", {class: "card"},
      element("figcaption", {}, element("h3", {}, data.runs.length > 1 ? `${name}, ${run.name}` : name),
        element("p", {class: "muted small"}, `${found.words} Dark cells hold most samples of their step; the line is the mean.`)),
      heatmap(`${name} over steps, mean from ${number(found.mean[0])} to ${number(found.mean.at(-1))}`, found))));
    return [element("h2", {}, "Distributions over steps"), figures.length ? element("div", {class: "charts"}, figures)
      : element("p", {class: "muted"}, "No samples were logged, so there are no distributions.")];
  },
};

pages.time = {
  title: "Time",
  render(data) {
    return data.runs.flatMap((run) => {
      const names = Object.keys(run.metrics).filter((name) => name.startsWith("time_s/") && name !== "time_s/evaluate");
      const rows = run.steps.map((_, i) => i).filter((i) => run.metrics["perf/step_s"]?.[i] != null);
      if (!names.length || !rows.length) return [element("p", {class: "muted"}, `${run.name} has no times yet.`)];
      const column = (name) => rows.map((i) => run.metrics[name][i] ?? 0);
      const total = column("perf/step_s").reduce((a, b) => a + b, 0);
      const sums = names.map((name) => [name, column(name).reduce((a, b) => a + b, 0)]).sort((a, b) => b[1] - a[1]);
      const rest = total - sums.reduce((a, [, sum]) => a + sum, 0);
      const lines = [...sums, ...(rest > 0 ? [["no worker busy", rest]] : [])].map(([name, sum]) => [name.replace("time_s/", ""),
        number(sum / rows.length), share(sum / total)]);
      const top = Object.fromEntries(sums.slice(0, 6).map(([name]) => [name.replace("time_s/", ""), column(name)]));
      return [
        element("h2", {}, data.runs.length > 1 ? `Seconds per step, ${run.name}` : "Seconds per step"),
        element("div", {class: "card"}, stackedChart(`Seconds of each call per step; the longest is ${lines[0][0]}`, rows.map((i) => run.steps[i]), top)),
        element("h2", {}, "Mean step"), element("div", {class: "card"}, table("Mean step", ["call", "#seconds", "#share"], lines)),
        ...timeline(run),
      ];
    });
  },
};

function share(part) {
  return part < 0.01 ? "< 1 %" : `${Math.round(100 * part)} %`;
}

/** Draw the recorded calls around one step on a common axis, one lane per host, and list who waited for whom. */
function timeline(run) {
  const {kinds, names, hosts, waits} = run.timeline;
  const calls = run.timeline.calls.map(([step, kind, name, host, lane, begin, seconds]) => ({step, kind: kinds[kind], name, host: hosts[host], lane, begin, end: begin + seconds, seconds}));
  if (!calls.length) return [element("p", {class: "muted small"}, "A timeline of calls needs the hooks `report`:  plugins.hooks=[report]")];
  const steps = [...new Set(calls.filter((it) => it.kind === "step").map((it) => it.step))].sort((a, b) => a - b);
  const place = element("div", {class: "card"});
  const choose = element("select", {"aria-label": "Step of the timeline", onchange: draw}, steps.map((step) => element("option", {value: step, selected: step === steps.at(-1)}, `step ${step}`)));
  function draw() {
    const step = Number(choose.value);
    const own = calls.filter((it) => it.step === step);
    const begin = Math.min(...own.map((it) => it.begin)), end = Math.max(...own.map((it) => it.end));
    const inside = calls.filter((it) => it.begin <= end && it.end >= begin);
    const shown = [...new Set(inside.map((it) => `${it.host}\n${it.lane}`))].sort((a, b) => hosts.indexOf(a.split("\n")[0]) - hosts.indexOf(b.split("\n")[0]) || a.localeCompare(b));
    place.replaceChildren(legend([...new Set(inside.map((it) => it.name))].map((name) => [`var(--run${name % 6})`, names[name]])),
      ...shown.map((key) => {
        const [host, lane] = key.split("\n");
        return laneOf(host, inside.filter((it) => it.host === host && it.lane === Number(lane)), {begin, end, step, names});
      }));
  }
  if (steps.length) draw();
  const most = Math.max(...calls.map((it) => it.end));
  const rows = Object.entries(waits).flatMap(([host, found]) => Object.entries(found).map(([name, seconds]) => [host, name, number(seconds), share(seconds / most)]));
  return [element("h2", {}, "Timeline"), element("div", {class: "controls"}, element("label", {}, "Calls around", choose)), place,
    element("p", {class: "muted small"}, "Pale calls belong to another step; striped ones to an evaluation or a checkpoint. The controller's lane shows what it waited for."),
    element("h2", {}, "Waiting"), element("p", {class: "muted small"}, `Time in which a host ran no call, by what ran on other hosts meanwhile, in the last ${number(most)} s.`),
    element("div", {class: "card"}, table("Waiting", ["host", "waited for", "#seconds", "#share"], rows))];
}

function laneOf(host, calls, {begin, end, step, names}) {
  const spent = calls.reduce((a, it) => a + Math.min(end, it.end) - Math.max(begin, it.begin), 0);
  return element("div", {class: "lane"}, element("span", {class: "small"}, `${host}, ${number(spent)} s`),
    element("div", {class: "track", role: "img", "aria-label": `${host}: ${number(spent)} of ${number(end - begin)} seconds, ${[...new Set(calls.map((it) => names[it.name]))].join(", ")}`}, calls.map((it) => {
      const bar = element("i", {title: `${names[it.name]}, ${it.kind} ${it.step}: ${number(it.seconds)} s`, class: `${it.step === step ? "" : "pale"} ${it.kind === "step" ? "" : "striped"}`});
      const left = Math.max(begin, it.begin);
      bar.style.left = `${(100 * (left - begin)) / (end - begin || 1)}%`;
      bar.style.width = `${(100 * (Math.min(end, it.end) - left)) / (end - begin || 1)}%`;
      bar.style.backgroundColor = `var(--run${it.name % 6})`;
      return bar;
    })));
}

pages.evaluation = {
  title: "Evaluation",
  render(data) {
    const names = Object.keys(data.table).filter((name) => name.startsWith("eval/") && name !== "eval/samples");
    if (!names.length) return [element("p", {class: "muted"}, "This run has no held-out prompts. The setting is  data.eval.")];
    return [element("h2", {}, "Held-out results"), element("div", {class: "charts"}, names.map((name) => figure(data, name, 0))), ...data.runs.flatMap((run, index) => promptGrid(run, index))];
  },
};

/** Show each held-out prompt over the evaluations: learned, lost, always, never. */
function promptGrid(run, index) {
  const samples = run.samples.filter((sample) => sample.kind === "evaluation");
  if (!samples.length) return [];
  const steps = [...new Set(samples.map((it) => it.step))].sort((a, b) => a - b);
  const prompts = new Map();
  for (const it of samples) prompts.set(it.prompt_id, [...(prompts.get(it.prompt_id) ?? []), it]);
  const threshold = run.config["eval.pass_threshold"] ?? 1;
  const rows = [...prompts].map(([id, found]) => {
    const passed = steps.map((step) => { const at = found.filter((it) => it.step === step); return at.length ? at.some((it) => it.reward >= threshold) : null; });
    const [first, last] = [passed.find((it) => it != null), passed.findLast((it) => it != null)];
    const verdict = passed.every((it) => it !== true) ? "never" : passed.every((it) => it !== false) ? "always" : last && !first ? "learned" : !last ? "lost" : "unsteady";
    return {id, found, passed, verdict};
  }).sort((a, b) => a.verdict.localeCompare(b.verdict));
  const tally = Object.entries(Object.groupBy(rows, (it) => it.verdict)).map(([name, inside]) => `${inside.length} ${name}`).join(", ");
  const lines = rows.slice(0, 300).map(({id, found, passed, verdict}) => element("tr", {}, element("th", {scope: "row", class: "small"}, verdict),
    element("td", {class: "small mono"}, found[0].prompt.slice(-60)),
    element("td", {class: "small"}, element("button", {onclick: () => compare(found.map((it) => ({...it, run, index})), "One held-out prompt over the run")}, "Responses")),
    passed.map((it, i) => element("td", {class: `cell ${it == null ? "" : it ? "pass" : "fail"}`, title: `step ${steps[i]}: ${it == null ? "not asked" : it ? "passed" : "failed"}`}, it ? "✓" : ""))));
  return [element("h2", {}, "Held-out prompts over time"), element("p", {}, `${tally}. A column is an evaluation, at steps ${steps.join(", ")}; ✓ passed.`),
    element("div", {class: "scroll card"}, element("table", {class: "grid", "aria-label": "Held-out prompts over time"}, element("tbody", {}, lines)))];
}
