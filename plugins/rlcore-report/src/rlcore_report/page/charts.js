// Charts with uPlot. Each has a text alternative, and is drawn again when width or theme change.

const drawn = new Set(); // {redraw()} of the charts on the page
const watcher = new ResizeObserver((entries) => entries.forEach(({target, contentRect}) => target.resize?.(contentRect.width)));

/** Smooth values with an exponential moving average that starts without bias; gaps stay gaps. */
function smooth(values, weight) {
  let mean = 0, total = 0;
  return values.map((value) => {
    if (value == null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

const FEWEST_TO_SMOOTH = 20;
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6, 1e7];

/** Keep room around a constant. */
function valueRange(u, low, high) {
  if (low == null) return [0, 1];
  if (low === high) return low === 0 ? [-0.5, 0.5] : [low - Math.abs(low) / 2, low + Math.abs(low) / 2];
  return uPlot.rangeNum(low, high, 0.1, true);
}

function axes(extra = {}) {
  const style = () => ({stroke: () => color("--muted"), grid: {stroke: () => color("--grid"), width: 1}, ticks: {show: false}});
  const compact = (u, splits) => splits.map((v) => (v == null ? "" : Math.abs(v) >= 1e4 ? v.toLocaleString("en", {notation: "compact"}) : number(v)));
  return [{...style(), values: compact, size: 34, incrs: WHOLE}, {...style(), values: compact, size: 58, ...extra}];
}

/** Put a chart into `place`. `make(width)` returns [options, data] of uPlot. */
function chart(place, label, make) {
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", label);
  let plot = null;
  const draw = (width) => {
    plot?.destroy();
    const [options, data] = make(width);
    plot = new uPlot({width, height: 190, ...options}, data, place);
  };
  place.resize = (width) => {
    if (width < 40) return;
    if (plot) plot.setSize({width, height: plot.height});
    else draw(width);
  };
  place.redraw = () => plot && place.isConnected && draw(place.clientWidth);
  drawn.add(place);
  watcher.observe(place);
  return place;
}

/** Forget the charts of a page that is left. */
function clearCharts() {
  drawn.forEach((place) => watcher.unobserve(place));
  drawn.clear();
}

/** Draw one metric of several runs: raw values pale, smoothed values on top, the healthy range shaded. */
function metricChart(data, name, weight = 0) {
  const runs = data.runs.map((run, index) => ({run, index})).filter(({run}) => known(run, name).length && !run.hidden);
  const steps = [...new Set(runs.flatMap(({run}) => known(run, name).map(([step]) => step)))].sort((a, b) => a - b);
  const columns = runs.map(({run}) => {
    const values = new Map(known(run, name));
    return steps.map((step) => values.get(step) ?? null);
  });
  const few = steps.length < 40;
  if (steps.length < FEWEST_TO_SMOOTH) weight = 0;
  const series = ({index, run}, width, alpha, hidden) => ({
    label: hidden ? " " : data.runs.length > 1 ? run.name : "value",
    stroke: () => runColor(index) + alpha,
    width, spanGaps: true,
    points: {show: few && !hidden, size: 5, fill: () => runColor(index)},
    value: (u, value) => number(value),
  });
  const raw = weight > 0 ? runs.map((it) => series(it, 1, "55", true)) : [];
  const top = runs.map((it) => series(it, 1.8, "", false));
  const lines = columns.map((values) => (weight > 0 ? smooth(values, weight) : values));
  const options = {
    cursor: {sync: {key: "step"}, drag: {x: true, y: false}},
    scales: {x: {time: false}, y: {range: valueRange}},
    axes: axes(),
    series: [{label: "step"}, ...raw, ...top],
    hooks: {drawClear: [(u) => shadeRange(u, data.table[name])], ready: [(u) => hideLegend(u, raw.length)]},
  };
  const words = runs.map(({run}) => describe(run, name)).join("; ");
  return chart(element("div"), `${name}: ${words}`, () => [options, [steps, ...(weight > 0 ? columns : []), ...lines]]);
}

function describe(run, name) {
  const values = known(run, name);
  const [first, last] = [values[0], values.at(-1)];
  return `${run.name} from ${number(first[1])} at step ${first[0]} to ${number(last[1])} at step ${last[0]}`;
}

/** Keep the rows of the pale series out of the legend. */
function hideLegend(u, count) {
  const rows = u.root.querySelectorAll(".u-series");
  for (let i = 1; i <= count; i++) rows[i].hidden = true;
}

function shadeRange(u, row) {
  if (row?.low == null && row?.high == null) return;
  const {left, top, width, height} = u.bbox;
  const clip = (value) => Math.min(top + height, Math.max(top, u.valToPos(value, "y", true)));
  const upper = row.high == null ? top : clip(row.high), lower = row.low == null ? top + height : clip(row.low);
  u.ctx.save();
  u.ctx.fillStyle = color("--range");
  u.ctx.fillRect(left, upper, width, lower - upper);
  u.ctx.restore();
}

/** Draw stacked areas: names -> values at `steps`. */
function stackedChart(label, steps, columns) {
  const names = Object.keys(columns);
  const sums = [];
  names.forEach((name, i) => sums.push(columns[name].map((value, k) => (value ?? 0) + (i ? sums[i - 1][k] : 0))));
  const order = names.map((_, i) => names.length - 1 - i); // the highest first, so that lower areas cover it
  const options = {
    height: 260,
    scales: {x: {time: false}, y: {range: (u, low, high) => [0, high * 1.05 || 1]}},
    axes: axes(),
    series: [{label: "step"}, ...order.map((i) => ({
      label: names[i], stroke: () => runColor(i), fill: () => runColor(i) + "cc", width: 0.5, points: {show: false},
      value: (u, v, s, k) => (k == null ? "" : number(columns[names[i]][k])),
    }))],
  };
  return chart(element("div"), label, () => [options, [steps, ...order.map((i) => sums[i])]]);
}

/** Draw one histogram per step as columns of cells: {steps, low, high, counts}. */
function heatmap(label, found) {
  const cells = (u) => {
    const strong = runColor(0);
    u.ctx.save();
    u.ctx.beginPath();
    u.ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
    u.ctx.clip();
    found.steps.forEach((step, i) => {
      const left = u.valToPos(step, "x", true), right = u.valToPos(found.steps[i + 1] ?? step + (step - (found.steps[i - 1] ?? step - 1)), "x", true);
      const size = (found.high[i] - found.low[i]) / found.counts[i].length, most = Math.max(...found.counts[i]);
      found.counts[i].forEach((count, k) => {
        if (!count) return;
        const bottom = u.valToPos(found.low[i] + k * size, "y", true), top = u.valToPos(found.low[i] + (k + 1) * size, "y", true);
        u.ctx.globalAlpha = 0.12 + 0.88 * (count / most);
        u.ctx.fillStyle = strong;
        u.ctx.fillRect(left, top, Math.max(1, right - left), Math.max(1, bottom - top));
      });
    });
    u.ctx.restore();
  };
  const last = found.steps.at(-1) + (found.steps.at(-1) - (found.steps.at(-2) ?? found.steps.at(-1) - 1));
  const range = [Math.min(...found.low), Math.max(...found.high)];
  const options = {
    height: 230,
    legend: {show: false},
    scales: {x: {time: false, range: [found.steps[0], last]}, y: {range}},
    axes: axes(),
    series: [{}, {stroke: () => color("--ink"), width: 1.5, points: {show: false}}],
    hooks: {drawAxes: [cells]},
  };
  return chart(element("div"), label, () => [options, [found.steps, found.mean]]);
}
