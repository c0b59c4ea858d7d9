const SHOWN_AT_ONCE = 40;
const ORDERS = {
  latest: ["latest", (a, b) => b.step - a.step],
  best: ["highest reward", (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)],
  worst: ["lowest reward", (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity)],
  longest: ["longest", (a, b) => b.completion.length - a.completion.length],
  changed: ["most changed prompts", (a, b) => b.change - a.change || a.prompt_id - b.prompt_id || a.step - b.step],
};

pages.samples = {
  title: "Samples",
  render(data) {
    const all = data.runs.flatMap((run, index) => withChange(run.samples).map((sample) => ({...sample, run, index})));
    if (!all.length) return [element("p", {}, "No samples were logged. The setting is  trainer.log_samples.")];
    const list = element("ol", {class: "plain"});
    const count = element("p", {class: "muted", role: "status"});
    const more = element("button", {onclick: () => show(SHOWN_AT_ONCE)}, "Show more");
    const field = (name, label, properties) => {
      const input = element("input", {id: name, ...properties, value: view.samples[name] ?? "", oninput: draw});
      return element("label", {}, label, input);
    };
    const order = element("select", {id: "order", onchange: draw}, Object.entries(ORDERS).map(([key, [label]]) => element("option", {value: key, selected: key === view.samples.order}, label)));
    const kinds = new Set(all.map((sample) => sample.kind ?? "training"));
    const kind = element("select", {id: "kind", onchange: draw}, ["all", ...kinds].map((it) => element("option", {selected: it === view.samples.kind}, it)));
    view.samples.tint ??= "none";
    const tint = element("select", {id: "tint", onchange: draw}, tintsOf(all).map((key) => element("option", {value: key, selected: key === view.samples.tint}, TINTS[key].label)));
    const colors = element("div");
    const form = element("div", {class: "controls"},
      field("words", "Search", {type: "search", placeholder: "words in prompt or response"}),
      field("low", "Reward from", {type: "number", step: "any"}), field("high", "to", {type: "number", step: "any"}),
      field("from", "Step from", {type: "number"}), field("until", "to", {type: "number"}), field("prompt", "Prompt", {type: "number"}),
      element("label", {}, "Order", order), kinds.size > 1 ? element("label", {}, "Kind", kind) : null,
      all.some((sample) => sample.tokens) ? element("label", {}, "Color tokens by", tint) : null);
    let found = [], shown = 0;
    function show(n) {
      list.append(...found.slice(shown, shown + n).map((sample) => element("li", {}, article(sample, all))));
      shown = Math.min(found.length, shown + n);
      more.hidden = shown >= found.length;
    }
    function draw() {
      for (const input of form.querySelectorAll("input, select")) view.samples[input.id] = input.value;
      found = all.filter(matches(view.samples)).sort(ORDERS[view.samples.order][1]);
      count.textContent = `${found.length.toLocaleString("en")} of ${all.length.toLocaleString("en")} samples`;
      view.strongest = view.samples.tint === "none" ? 0 : strongest(all, view.samples.tint);
      colors.replaceChildren(...(view.samples.tint === "none" ? [] : [tintLegend(all, view.samples.tint)]));
      list.replaceChildren();
      shown = 0;
      show(SHOWN_AT_ONCE);
    }
    const end = new IntersectionObserver((entries) => entries.some((it) => it.isIntersecting) && show(SHOWN_AT_ONCE), {rootMargin: "800px"});
    end.observe(more);
    view.samples.order ??= "latest";
    draw();
    return [form, colors, count, list, more];
  },
};

/** Add to each sample the spread of the rewards of its prompt over all steps. */
function withChange(samples) {
  const ranges = new Map();
  for (const {prompt_id, reward} of samples) {
    if (reward == null) continue;
    const [low, high] = ranges.get(prompt_id) ?? [reward, reward];
    ranges.set(prompt_id, [Math.min(low, reward), Math.max(high, reward)]);
  }
  return samples.map((sample) => {
    const [low, high] = ranges.get(sample.prompt_id) ?? [0, 0];
    return {...sample, change: high - low};
  });
}

/** Return the test of a sample that the form describes; an empty field lets all pass. */
function matches({words = "", low = "", high = "", from = "", until = "", prompt = "", kind = "all"}) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const within = (value, a, b) => (a === "" || (value != null && value >= Number(a))) && (b === "" || (value != null && value <= Number(b)));
  return (sample) => within(sample.reward, low, high) && within(sample.step, from, until)
    && (prompt === "" || sample.prompt_id === Number(prompt))
    && (kind === "all" || (sample.kind ?? "training") === kind)
    && wanted.every((word) => sample.prompt.toLowerCase().includes(word) || sample.completion.toLowerCase().includes(word));
}

/** Return the samples of the same prompt in the same step: a group. */
function groupOf(sample, all) {
  return all.filter((other) => other.run === sample.run && other.step === sample.step && other.prompt_id === sample.prompt_id && other.kind === sample.kind);
}

function article(sample, all, inGroup = false) {
  const group = inGroup ? [] : groupOf(sample, all);
  const history = inGroup ? [] : all.filter((other) => other.run === sample.run && other.prompt_id === sample.prompt_id && other.step !== sample.step);
  const parts = Object.entries(sample.parts ?? {}).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  return element("article", {class: "card sample", "aria-label": `Sample of step ${sample.step}, reward ${number(sample.reward)}`},
    element("header", {},
      sample.run.several ? swatch(sample.index) : null,
      element("span", {class: "reward"}, sample.reward == null ? "no reward" : `reward ${number(sample.reward)}`),
      element("span", {class: "muted small"}, `step ${sample.step} · prompt ${sample.prompt_id} · ends by ${sample.finish_reason}${sample.kind ? ` · ${sample.kind}` : ""}`),
      parts ? element("span", {class: "muted small"}, parts) : null,
      element("span", {class: "grow"}),
      group.length > 1 ? element("button", {onclick: () => compare(group, "Responses to one prompt in one step")}, `Group of ${group.length}`) : null,
      history.length ? element("button", {onclick: () => compare([...group, ...history].sort((a, b) => a.step - b.step), "Responses to one prompt over the run")}, "Over time") : null),
    inGroup ? response(sample) : element("div", {class: "texts"}, labeled("prompt", sample.prompt), element("div", {}, response(sample))),
    details(sample));
}

/** Return the response: turns of an episode, colored tokens, or plain text. */
function response(sample) {
  const turns = sample.columns?.episode_messages;
  if (Array.isArray(turns)) {
    return element("div", {}, turns.map((turn) => element("div", {class: "turn"}, element("b", {}, turn?.role ?? "message"),
      element("pre", {}, typeof turn?.content === "string" ? turn.content : JSON.stringify(turn, null, 1)))));
  }
  if (sample.tokens?.[view.samples.tint] != null) return tinted(sample.tokens, view.samples.tint, view.strongest);
  return labeled("response", sample.completion || "(empty)");
}

// What tokens can be colored by: label, unit, whether values have both signs, and the legend of the strongest colors.
const TINTS = {
  none: {label: "nothing"},
  log_prob: {label: "surprise (low log-prob)", of: (tokens) => tokens.log_prob.map((value) => -value), most: 5, high: "least likely"},
  advantage: {label: "advantage", high: "reinforced", low: "discouraged"},
  gap: {label: "log-prob gap (trainer minus engine)", high: "more likely to the trainer", low: "more likely to the engine"},
  entropy: {label: "entropy", high: "most uncertain"},
  mask: {label: "tokens not learned from", of: (tokens) => tokens.mask.map((it) => 1 - it), high: "not learned from"},
  version: {label: "version of the weights", of: (tokens) => valuesOf(tokens, "version").map((it, i, all) => Math.max(...all) - it), high: "updates older than the last token"},
};

/** Return a value per token; one number stands for all tokens. */
function valuesOf(tokens, name) {
  return typeof tokens[name] === "number" ? tokens.text.map(() => tokens[name]) : tokens[name];
}

function tintOf(tokens, tint) {
  return TINTS[tint].of?.(tokens) ?? valuesOf(tokens, tint);
}

/** Return the tints that some sample has values for; a version is one number if all tokens have the same. */
function tintsOf(samples) {
  const has = (name) => samples.some((it) => it.tokens?.[name] != null && !(name === "version" && typeof it.tokens.version === "number"));
  return Object.keys(TINTS).filter((name) => name === "none" || has(name));
}

/** Return the absolute value from which on a tint has the strongest color. */
function strongest(samples, tint) {
  const largest = samples.reduce((most, {tokens}) => (tokens?.[tint] == null ? most : tintOf(tokens, tint).reduce((a, it) => Math.max(a, Math.abs(it)), most)), 0);
  return Math.min(largest, TINTS[tint].most ?? Infinity);
}

function tintLegend(samples, tint) {
  const {high, low} = TINTS[tint], most = strongest(samples, tint);
  const text = (words, sign) => (tint === "mask" ? words : `${words} (${number(tint === "log_prob" ? -most : sign * most)})`);
  return legend([["var(--run1)", text(high, 1)], ...(low ? [["var(--run0)", text(low, -1)]] : [])]);
}

/** Return the tokens of a response, each with a background; the values of a token are its title. */
function tinted(tokens, tint, most) {
  const values = tintOf(tokens, tint), known = Object.keys(TINTS).filter((name) => tokens[name] != null && name !== "mask");
  const parts = tokens.text.map((text, i) => {
    const words = known.map((name) => `${name.replace("_", "-")} ${number(valuesOf(tokens, name)[i])}`).join(", ");
    const part = element("span", {title: `${words}${tokens.mask[i] ? "" : ", not learned from"}`}, text);
    part.style.backgroundColor = `color-mix(in srgb, var(${values[i] < 0 ? "--run0" : "--run1"}) ${Math.round(70 * Math.min(1, Math.abs(values[i]) / (most || 1)))}%, transparent)`;
    return part;
  });
  return element("div", {}, element("span", {class: "muted small"}, "response, token by token"),
    element("pre", {class: "response", "aria-label": `response, token by token, colored by ${TINTS[tint].label}`, tabindex: 0}, parts));
}

/** Return a text under its label; it can be scrolled with the keyboard. */
function labeled(label, text) {
  return element("div", {}, element("span", {class: "muted small"}, label), element("pre", {class: label, "aria-label": label, tabindex: 0}, text));
}

function details(sample) {
  const rows = Object.entries(sample.columns ?? {}).filter(([name]) => name !== "episode_messages");
  if (!rows.length) return null;
  return element("details", {}, element("summary", {class: "small muted"}, rows.map(([name]) => name).join(", ")),
    table("Columns", ["column", "value"], rows.map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)])));
}

/** Show samples side by side. Escape closes the dialog, and the focus returns to its button. */
function compare(samples, title) {
  const dialog = element("dialog", {"aria-label": title, onclose: () => dialog.remove()},
    element("div", {class: "controls"}, element("h2", {}, title), element("span", {class: "grow"}), element("button", {autofocus: true, onclick: () => dialog.close()}, "Close")),
    element("pre", {class: "prompt"}, samples[0].prompt),
    element("div", {class: "group"}, samples.map((sample) => article(sample, samples, true))));
  document.body.append(dialog);
  dialog.showModal();
}
