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
    const tint = element("select", {id: "tint", onchange: draw}, Object.entries(TINTS).map(([key, label]) => element("option", {value: key, selected: key === view.samples.tint}, label)));
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
      list.replaceChildren();
      shown = 0;
      show(SHOWN_AT_ONCE);
    }
    const end = new IntersectionObserver((entries) => entries.some((it) => it.isIntersecting) && show(SHOWN_AT_ONCE), {rootMargin: "800px"});
    end.observe(more);
    view.samples.order ??= "latest";
    draw();
    return [form, count, list, more];
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
    inGroup ? response(sample) : element("div", {class: "texts"}, labelled("prompt", sample.prompt), element("div", {}, response(sample))),
    details(sample));
}

/** Return the response: turns of an episode, colored tokens, or plain text. */
function response(sample) {
  const turns = sample.columns?.episode_messages;
  if (Array.isArray(turns)) {
    return element("div", {}, turns.map((turn) => element("div", {class: "turn"}, element("b", {}, turn?.role ?? "message"),
      element("pre", {}, typeof turn?.content === "string" ? turn.content : JSON.stringify(turn, null, 1)))));
  }
  if (sample.tokens && view.samples.tint !== "none") return tinted(sample.tokens, view.samples.tint);
  return labelled("response", sample.completion || "(empty)");
}

const TINTS = {
  none: "nothing",
  log_prob: "surprise (low log-prob)",
  mask: "tokens not learned from",
};

/** Return the tokens of a response, each with a background; the value of a token is its title. */
function tinted(tokens, tint) {
  const strength = (i) => (tint === "mask" ? 1 - tokens.mask[i] : Math.min(1, -tokens.log_prob[i] / 5));
  const parts = tokens.text.map((text, i) => {
    const part = element("span", {title: `log-prob ${number(tokens.log_prob[i])}${tokens.mask[i] ? "" : ", not learned from"}`}, text);
    part.style.backgroundColor = `color-mix(in srgb, var(--run1) ${Math.round(70 * strength(i))}%, transparent)`;
    return part;
  });
  return element("div", {}, element("span", {class: "muted small"}, "response, token by token"),
    element("pre", {class: "response", "aria-label": "response, token by token", tabindex: 0}, parts));
}

/** Return a text under its label; it can be scrolled with the keyboard. */
function labelled(label, text) {
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
