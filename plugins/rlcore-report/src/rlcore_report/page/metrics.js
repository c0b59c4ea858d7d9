pages.metrics = {
  title: "Metrics",
  render(data, wanted) {
    const results = element("div");
    const search = element("input", {type: "search", placeholder: "reward, entropy, time_s …", "aria-label": "Filter metrics", id: "search", oninput: draw});
    const slider = element("input", {type: "range", min: 0, max: 0.98, step: 0.02, value: view.smoothing, oninput: draw});
    const runs = data.runs.length > 1 ? data.runs.map((run, index) => element("label", {},
      element("input", {type: "checkbox", checked: !run.hidden, onchange: (event) => { run.hidden = !event.target.checked; draw(); }}), swatch(index), run.name)) : [];
    search.value = view.metric;
    function draw() {
      [view.metric, view.smoothing] = [search.value, Number(slider.value)];
      clearCharts();
      const words = search.value.toLowerCase().split(/\s+/);
      const names = Object.keys(data.table).filter((name) => words.every((word) => name.toLowerCase().includes(word)));
      const groups = [...new Set(names.map((name) => data.table[name].group))];
      results.replaceChildren(...groups.map((group) => {
        const inside = names.filter((name) => data.table[name].group === group);
        return element("section", {}, element("h2", {}, group), element("div", {class: "charts"}, inside.map((name) => figure(data, name, view.smoothing))));
      }));
      if (!names.length) results.append(element("p", {class: "muted"}, "No metric has these words in its name."));
    }
    if (wanted) search.value = wanted;
    draw();
    return [element("div", {class: "controls"}, search, element("label", {}, "Smoothing", slider), runs), results];
  },
};
