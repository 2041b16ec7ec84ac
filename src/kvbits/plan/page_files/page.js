"use strict";
// The page: a state, which the address keeps, the controls that change it, and what is drawn of it.

const $ = id => document.getElementById(id);
const GIB = 2 ** 30, OWN = "own";
const SLIDERS = { context: 8, batch: 0, memory: 2 };  // each a power of two

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function drawn(tag, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

// -- the state, and the address -------------------------------------------------------------------------------------

const START = { ...DATA.start, layers: 32, heads: 8, dim: 128, parameters: 0 };
let state = { ...START };

function whole(text, least, greatest, otherwise) {
  const number = Math.round(Number(text));
  return Number.isFinite(number) && text !== "" ? Math.min(greatest, Math.max(least, number)) : otherwise;
}

/** A state in which everything is allowed, whatever the address says. */
function checked(wanted) {
  const found = { ...START };
  if (wanted.model === OWN || DATA.models[wanted.model]) found.model = wanted.model;
  found.context = whole(wanted.context, 1, DATA.limits.tokens, START.context);
  found.batch = whole(wanted.batch, 1, DATA.limits.batch, START.batch);
  found.memory = whole(wanted.memory, 1, DATA.limits.memory, START.memory);
  found.layers = whole(wanted.layers, 1, 10000, START.layers);
  found.heads = whole(wanted.heads, 1, 100000, START.heads);
  if (DATA.head_dims.includes(Number(wanted.dim))) found.dim = Number(wanted.dim);
  found.parameters = whole(wanted.parameters, 0, 1e15, START.parameters);
  if (DATA.weights.includes(wanted.weights)) found.weights = wanted.weights;
  found.schemes = wanted.schemes.filter(name => DATA.schemes[name]);
  return found;
}

function readAddress() {
  const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  return checked({ ...START, ...given, schemes: given.schemes === undefined ? START.schemes : given.schemes.split(";") });
}

function writeAddress() {
  const own = state.model === OWN ? ["layers", "heads", "dim", "parameters"] : [];
  const kept = ["model", ...own, "context", "batch", "memory", "weights"].map(name => [name, state[name]]);
  const address = "#" + new URLSearchParams([...kept, ["schemes", state.schemes.join(";")]]);
  if (address !== location.hash) history.replaceState(null, "", address);
}

function modelNow() {
  return state.model === OWN ? modelOfNumbers(state) : DATA.models[state.model];
}

// -- numbers, read off what kvbits.plan.page has written down -------------------------------------------------------

/** A value at a length. Coefficients in a table are those of the factors. */
function at([starts, values, more, period, rise], tokens, factors) {
  const rounds = period ? Math.max(0, Math.floor((tokens - starts[1]) / period)) : 0, place = tokens - rounds * period;
  const piece = starts.findLastIndex(start => start <= place), further = place - starts[piece];
  return factors.reduce((sum, factor, i) => sum + factor * (values[piece][i] + further * more[piece][i] + rounds * (rise[i] || 0)), 0);
}

/** A model of equal layers, as kvbits.plan.shapes.of_numbers makes it. */
function modelOfNumbers({ layers, heads, dim, parameters }) {
  const kind = `${dim}/${dim}/2`, weights = Object.entries(DATA.weight_bits).map(([how, bits]) => [how, Math.ceil(bits * parameters / 8)]);
  return {
    title: "numbers of your own", runs: [{ count: layers, kind, heads, width: 2 * dim * heads, packs: true, paper: null }],
    usual: { kind, heads }, weights: Object.fromEntries(weights), peak: null, windows: 0, trained: null, refusal: null, unrotatable: null,
    encodes: false, eager: false,
  };
}

/** Layers that are stored alike, [{run, form, count}]. Throws where an override names a layer that there is not. */
function partsOf(model, scheme) {
  const layers = model.runs.flatMap(run => Array(run.count).fill(run)), found = [];
  const forms = Array(layers.length).fill(scheme.forms[0]);
  for (const form of scheme.forms.slice(1))
    for (const layer of form.layers) {
      if (layer < -forms.length || layer >= forms.length) throw new Error(`names layer ${layer}, and the model has ${forms.length}`);
      forms.splice(layer, 1, form);
    }
  layers.forEach((run, index) => {
    const last = found[found.length - 1], form = forms[index];
    if (last && last.run === run && last.form === form) last.count++;
    else found.push({ run, form, count: 1 });
  });
  return found;
}

/** Bytes of a cache, those of its largest layer and of its packed ones, and the elements of these. */
function cacheOf(parts, tokens, rows, source) {
  const found = { bytes: 0, largest: 0, packed: 0, elements: 0 };
  for (const { run, form, count } of parts) {
    const real = run.packs && form.real[run.kind];
    if (real === null) throw new Error("does not fit heads of this size");
    let each;
    if (real) {
      each = at(real, tokens, [1, run.heads, rows, rows * run.heads]);
      found.packed += count * each;
      found.elements += count * rows * tokens * run.width;
    } else {
      const [fixed, row, token, ofSource] = run.own;
      each = fixed + rows * (row + token * tokens + ofSource * source);
    }
    found.bytes += count * each;
    found.largest = Math.max(found.largest, each);
  }
  return found;
}

/** Bytes of a row by the papers' accounting. */
function paperBytes(parts, tokens) {
  return parts.reduce((sum, { run, form, count }) =>
    sum + count * (run.paper ? at(run.paper, tokens, [1]) : at(form.paper[run.kind], tokens, [1, run.heads])), 0);
}

function paperBits(usual, scheme, tokens) {
  if (usual === null) return DATA.exact_bits;
  const [key, value] = usual.kind.split("/").map(Number);
  return 8 * at(scheme.forms[0].paper[usual.kind], tokens, [1, usual.heads]) / (tokens * usual.heads * (key + value));
}

/** A number that fits while one more does not; 0 if 1 does not, null if `end` does. */
function most(fits, end) {
  let low = 0, high = 1;
  while (high <= end && fits(high)) [low, high] = [high, 2 * high];
  if (low >= end) return null;
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (fits(middle)) low = middle;
    else high = middle;
  }
  return low;
}

/** One scheme under a setting {context, batch, memory, weights}; {error} where the model refuses it. */
function planOne(model, name, setting) {
  const scheme = DATA.schemes[name], weights = model.weights[setting.weights];
  if (model.refusal !== null && name !== "exact") return { name, error: model.refusal };
  if (scheme.pre_rope && model.unrotatable !== null) return { name, error: model.unrotatable };
  if (weights === undefined) return { name, error: "the files of this model's weights are not at hand" };
  try {
    const parts = partsOf(model, scheme), { context, batch, memory } = setting;
    const need = (tokens, rows) => {
      const cache = cacheOf(parts, tokens, rows, context), read = model.encodes ? Math.max(tokens, context) : tokens;
      const works = (model.peak || []).map(([none, ofRead, ofTokens, both]) => none + ofRead * read + ofTokens * tokens + both * read * tokens);
      const peak = works.length ? rows * Math.max(...works) + cache.largest : 0;
      return { cache, peak, total: weights + cache.bytes + peak };
    };
    const { cache, peak, total } = need(context, batch);
    return {
      name, weights, peak, total, real_bytes: cache.bytes, real_bits: cache.elements ? 8 * cache.packed / cache.elements : 0,
      paper_bits: paperBits(model.usual, scheme, context), paper_gib: batch * paperBytes(parts, context) / GIB, fits: total <= memory,
      max_context: most(tokens => need(tokens, batch).total <= memory, DATA.limits.tokens),
      max_batch: most(rows => need(context, rows).total <= memory, DATA.limits.batch),
      at: tokens => need(tokens, batch).total,
    };
  } catch (error) {
    return { name, error: error.message };
  }
}

// -- how numbers are written ----------------------------------------------------------------------------------------

const digits = (number, most) => number.toLocaleString("en", {
  minimumFractionDigits: most, maximumFractionDigits: most, roundingMode: "halfEven",  // as Python does
});
const gib = bytes => digits(bytes / GIB, bytes >= 100 * GIB ? 0 : bytes >= GIB ? 1 : 2) + " GiB";
const count = number => number === null ? "no limit" : number === 0 ? "none" : number.toLocaleString("en");
const short = number => number >= 2 ** 20 ? `${+(number / 2 ** 20).toPrecision(3)}m` : number >= 1024 ? `${+(number / 1024).toPrecision(3)}k` : `${number}`;

// -- what is drawn --------------------------------------------------------------------------------------------------

function render() {
  writeAddress();
  showControls();
  const model = modelNow(), setting = { ...state };
  const rows = state.schemes.map(name => planOne(model, name, setting));
  showAnswer(model, rows);
  showBars(rows);
  showChart(rows);
  showNumbers(rows);
  const notes = [];
  if (model.trained !== null && state.context > model.trained) notes.push(`The model was made for ${count(model.trained)} tokens.`);
  if (model.peak === null) notes.push("The peak of a prompt is not known for numbers alone, and is left out.");
  if (model.eager) notes.push("Transformers has no sdpa for this model: without a flash kernel, a matrix of scores of each of its heads comes on top of the peak.");
  if (model.windows) notes.push(`${model.windows} layers have a window and stay exact. They hold the whole prompt until the next step.`);
  const calibrated = state.schemes.filter(name => DATA.schemes[name].calibrated);
  if (calibrated.length) notes.push(`${calibrated.join(", ")}: to be calibrated on a text first.`);
  $("notes").replaceChildren(...notes.map(note => element("li", {}, note)));
}

function showAnswer(model, rows) {
  const packed = rows.filter(row => row.fits && DATA.schemes[row.name].packs), exact = rows.find(row => row.name === "exact");
  const name = ["default", "small"].find(alias => packed.some(row => row.name === alias));
  const best = packed.find(row => row.name === name) || packed[0] || rows.find(row => row.fits);
  const place = `${count(state.context)} tokens` + (state.batch > 1 ? ` in each of ${count(state.batch)} rows` : "");
  $("answer").textContent = !rows.length ? "Which schemes?" : best ? "It fits" + (exact && exact.fits ? "." : ", packed.") : "It does not fit.";
  if (!rows.length) $("lead").textContent = "Choose at least one.";
  else if (best) {
    const further = `Up to ${best.max_context === null ? "any number of" : count(best.max_context)} tokens would.`;
    $("lead").textContent = `${model.title} with ${place} takes ${gib(best.total)} of ${gib(state.memory)} under ${best.name}. ${further}`;
  } else {
    const least = rows.filter(row => !row.error).sort((a, b) => a.total - b.total)[0];
    $("lead").textContent = least
      ? `${model.title} with ${place} takes ${gib(least.total)} even under ${least.name}, and there are ${gib(state.memory)}. ` +
        (least.max_context ? `${count(least.max_context)} tokens would fit.` : "The weights alone are too much, or nearly.")
      : rows[0].error;
  }
}

function showBars(rows) {
  const largest = Math.max(state.memory, ...rows.filter(row => !row.error).map(row => row.total));
  const share = bytes => `${100 * bytes / largest}%`;
  $("bars").replaceChildren(...rows.map(row => {
    const name = element("span", { class: "name" }, row.name);
    if (row.error) return element("div", { class: "bar" }, name, element("span", { class: "error" }, row.error));
    const parts = [["weights", row.weights], ["cache", row.real_bytes], ["peak", row.peak]];
    const track = element("span", { class: "track", role: "img", "aria-label": `${row.name}: ${gib(row.total)}` },
      ...parts.map(([kind, bytes]) => element("i", { class: kind, style: `width:${share(bytes)}`, title: `${kind}: ${gib(bytes)}` })),
      element("span", { class: "limit", style: `left:${share(state.memory)}` }));
    return element("div", { class: "bar" }, name, track, element("span", { class: row.fits ? "total" : "total no" }, gib(row.total)));
  }));
}

const colourOf = (row, index) => `var(--s${DATA.schemes[row.name].packs ? 1 + index % 7 : 0})`;
const dashesOf = index => index > 7 ? "7 4" : "none";

function showChart(rows) {
  const lines = rows.filter(row => !row.error), narrow = innerWidth <= 720;
  const [width, height, left, right, top, bottom] = narrow ? [720, 560, 84, 16, 30, 84] : [960, 380, 62, 12, 20, 44];
  const reach = Math.max(state.context, ...lines.map(row => row.max_context || 0)), last = 1.15 * Math.min(reach, 2 ** 34);
  const high = 1.25 * Math.max(state.memory, Math.min(2 * state.memory, ...lines.map(row => row.total)));
  const x = tokens => left + (width - left - right) * tokens / last;
  const y = bytes => top + (height - top - bottom) * (1 - bytes / high);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "memory against tokens in the cache" });
  for (const step of steps(high / GIB)) {
    svg.append(drawn("line", { x1: left, x2: width - right, y1: y(step * GIB), y2: y(step * GIB), stroke: "var(--grid)" }));
    svg.append(drawn("text", { x: left - 10, y: y(step * GIB) + 5, "text-anchor": "end" }, digits(step, step > 0 && step < 1 ? 1 : 0)));
  }
  const unit = last > 2 ** 21 ? 2 ** 20 : last > 2 ** 11 ? 2 ** 10 : 1;
  for (const step of steps(last / unit))
    svg.append(drawn("text", { x: x(step * unit), y: height - bottom + (narrow ? 30 : 20), "text-anchor": "middle" }, short(step * unit)));
  svg.append(drawn("text", { x: width - right, y: height - (narrow ? 14 : 6), "text-anchor": "end" }, "tokens in the cache"));
  svg.append(drawn("text", { x: left - 10, y: top - (narrow ? 8 : 6), "text-anchor": "end" }, "GiB"));
  svg.append(drawn("line", { x1: x(state.context), x2: x(state.context), y1: top, y2: height - bottom, stroke: "var(--soft)", "stroke-dasharray": "3 4" }));
  lines.forEach((row, index) => svg.append(drawn("polyline", {
    points: curve(row, last, high).map(([tokens, bytes]) => `${x(tokens).toFixed(1)},${y(bytes).toFixed(1)}`).join(" "),
    fill: "none", stroke: colourOf(row, index), "stroke-width": narrow ? 4 : 2.5, "stroke-dasharray": dashesOf(index),
  })));
  svg.append(drawn("line", { x1: left, x2: width - right, y1: y(state.memory), y2: y(state.memory), stroke: "var(--ink)", "stroke-width": 2 }));
  svg.append(drawn("text", { x: left + 8, y: y(state.memory) - 7, fill: "var(--ink)", "font-weight": 600 }, `${gib(state.memory)} of memory`));
  lines.forEach((row, index) => {
    if (row.max_context) svg.append(drawn("circle", { cx: x(row.max_context), cy: y(state.memory), r: narrow ? 8 : 5, fill: colourOf(row, index), stroke: "var(--paper)", "stroke-width": 2 }));
  });
  $("chart").replaceChildren(svg);
  $("reach").replaceChildren(...lines.map((row, index) => {
    const swatch = drawn("svg", { viewBox: "0 0 26 8" });
    swatch.append(drawn("line", { x1: 0, x2: 26, y1: 4, y2: 4, stroke: colourOf(row, index), "stroke-width": 4, "stroke-dasharray": dashesOf(index) }));
    return element("li", {}, swatch, element("code", {}, row.name), element("span", {}, count(row.max_context)));
  }));
}

/** Points [tokens, bytes] of a scheme up to the right border, or to where it leaves at the top. */
function curve(row, last, high) {
  const points = [];
  for (let i = 0; i <= 120; i++) {
    const tokens = Math.max(1, Math.round(last * i / 120)), bytes = row.at(tokens), before = points[points.length - 1];
    if (bytes > high) {
      if (before) points.push([before[0] + (tokens - before[0]) * (high - before[1]) / (bytes - before[1]), high]);
      break;
    }
    points.push([tokens, bytes]);
  }
  return points;
}

/** Round numbers from 0 up to `end`. */
function steps(end) {
  const rough = end / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(n => n * power).find(n => n >= rough), found = [];
  for (let at = 0; at <= end; at += step) found.push(at);
  return found;
}

function showNumbers(rows) {
  const head = ["scheme", "bits, papers", "GiB, papers", "bits, real", "GiB, real", "weights", "peak", "in all, GiB", "longest context", "largest batch"];
  const body = rows.map(row => {
    const name = element("th", { scope: "row", title: DATA.schemes[row.name].scheme + (DATA.schemes[row.name].advice ? ": " + DATA.schemes[row.name].advice : "") }, row.name);
    if (row.error) return element("tr", {}, name, element("td", { class: "refused", colspan: head.length - 1 }, row.error));
    const cells = [digits(row.paper_bits, 2), digits(row.paper_gib, 2), row.real_bits ? digits(row.real_bits, 2) : "-",
      ...[row.real_bytes, row.weights, row.peak, row.total].map(bytes => digits(bytes / GIB, 2)), count(row.max_context), count(row.max_batch)];
    return element("tr", row.fits ? {} : { class: "no" }, name, ...cells.map(cell => element("td", {}, cell)));
  });
  $("numbers").replaceChildren(
    element("thead", {}, element("tr", {}, ...head.map(title => element("th", { scope: "col" }, title)))),
    element("tbody", {}, ...body));
}

// -- controls -------------------------------------------------------------------------------------------------------

function showControls() {
  $("model").value = state.model;
  $("own").hidden = state.model !== OWN;
  for (const name of ["layers", "heads", "dim"]) show($(name), state[name]);
  show($("parameters"), state.parameters / 1e9);
  const shown = { context: state.context, batch: state.batch, memory: +(state.memory / GIB).toFixed(3) };
  for (const name of Object.keys(SLIDERS)) {
    show($(`${name}-number`), shown[name]);
    if (name === "context") $("context-short").textContent = state.context >= 1024 ? short(state.context) : "";
    if (document.activeElement !== $(name)) $(name).value = Math.log2(shown[name]);
  }
  const gpu = Object.entries(DATA.gpus).find(([, bytes]) => bytes === state.memory);
  $("gpu").value = gpu && DATA.gpus[$("gpu").value] !== state.memory ? gpu[0] : gpu ? $("gpu").value : "";
  $("weights").value = state.weights;
  const model = modelNow();
  for (const box of $("schemes").querySelectorAll("input")) {
    box.checked = state.schemes.includes(box.value);
    const scheme = DATA.schemes[box.value];
    const refused = (model.refusal !== null && box.value !== "exact") || (scheme.pre_rope && model.unrotatable !== null);
    box.parentElement.classList.toggle("refused", refused);
  }
}

/** A value in a field, but not under the fingers that type it. */
function show(field, value) {
  if (document.activeElement !== field) field.value = value;
}

function change(part) {
  state = checked({ ...state, ...part });
  render();
}

function options(select, pairs) {
  select.replaceChildren(...pairs.map(([value, text]) => element("option", { value }, text)));
}

function begin() {
  options($("model"), [...Object.entries(DATA.models).map(([name, model]) => [name, model.title]), [OWN, "numbers of your own"]]);
  options($("dim"), DATA.head_dims.map(dim => [dim, dim]));
  options($("gpu"), [["", "another device"], ...Object.entries(DATA.gpus).map(([name, bytes]) => [name, `${name.toUpperCase().replaceAll("-", " ")}, ${gib(bytes)}`])]);
  const words = { auto: "their own type", file: "their files", none: "none: the cache alone" };
  options($("weights"), DATA.weights.map(name => [name, words[name] || name]));
  $("schemes").replaceChildren(...Object.entries(DATA.schemes).map(([name, scheme]) =>
    element("label", { title: scheme.advice || scheme.scheme }, element("input", { type: "checkbox", value: name }), name)));

  $("model").addEventListener("change", () => change({ model: $("model").value }));
  for (const name of ["layers", "heads", "dim"]) $(name).addEventListener("input", () => change({ [name]: $(name).value }));
  $("parameters").addEventListener("input", () => change({ parameters: $("parameters").value === "" ? "" : 1e9 * $("parameters").value }));
  for (const [name, unit] of [["context", 1], ["batch", 1], ["memory", GIB]]) {
    $(name).addEventListener("input", () => change({ [name]: Math.round(rounded(2 ** $(name).value)) * unit }));
    const number = $(`${name}-number`);
    number.addEventListener("input", () => { if (number.value !== "") change({ [name]: number.value * unit }); });
    number.addEventListener("blur", render);
  }
  $("gpu").addEventListener("change", () => { if ($("gpu").value) change({ memory: DATA.gpus[$("gpu").value] }); });
  $("weights").addEventListener("change", () => change({ weights: $("weights").value }));
  $("schemes").addEventListener("change", event => {
    const { value, checked: on } = event.target;
    change({ schemes: on ? [...state.schemes, value] : state.schemes.filter(name => name !== value) });
  });
  $("controls").addEventListener("submit", event => event.preventDefault());
  addEventListener("hashchange", () => { state = readAddress(); render(); });
  addEventListener("resize", render);
  state = readAddress();
  render();
}

/** What a slider gives: a power of two, or three digits. */
function rounded(number) {
  const power = 2 ** Math.round(Math.log2(number));
  return Math.abs(number / power - 1) < 0.02 ? power : Number(number.toPrecision(3));
}

begin();
