"use strict";
// The closed form of kvbits.plan for a prompt in one piece, on one device, without padding. All its constants are DATA.

// -- one layer: kvbits.store.room and kvbits.plan.memory ----------------------------------------------------------------

function packable(form, tokens) {
  if (form.residual === null) return 0;
  return Math.max(0, Math.floor((tokens - form.sinks - form.late - form.residual) / form.block));
}

function mostExact(form) {
  return form.residual === null ? 0 : form.sinks + form.late + form.residual + form.block - 1;
}

/** Bytes of a packed layer, and the elements it holds; null where the scheme does not fit its heads. */
function packedLayer(form, attention, itemsize, tokens, batch) {
  const size = form.sizes[`${attention.key}/${attention.value}/${itemsize}`];
  if (!size) return null;
  const [record, sharedBefore, eachBefore, sharedAfter, eachAfter] = size;
  const blocks = packable(form, tokens);
  const held = tokens - blocks * form.block;
  const room = blocks ? Math.max(held, mostExact(form)) : form.residual === null ? tokens : Math.min(tokens, mostExact(form));
  const columns = blocks ? blocks + Math.floor(blocks / DATA.growth.spare) : 0;
  const learned = blocks ? sharedAfter + attention.heads * eachAfter : sharedBefore + attention.heads * eachBefore;
  const bytes = blocks * batch * attention.heads * record + batch * columns * DATA.growth.table_bytes
    + batch * room * attention.token + learned;
  return { bytes, elements: batch * tokens * attention.heads * (attention.key + attention.value) };
}

/** Bytes of a layer of the model's own type: a prompt is there whole, whatever the window. */
function ownLayer(layer, tokens, batch, source) {
  return layer.fixed + batch * (layer.row + layer.token * tokens + layer.source * source);
}

/** Which form of a scheme layer `index` of `count` has. Throws where an override names a layer that there is not. */
function formOf(scheme, index, count) {
  for (const form of scheme.forms.slice(1))
    for (const layer of form.layers) {
      if (layer < -count || layer >= count) throw new Error(`names layer ${layer}, and the model has ${count}`);
      if (((layer % count) + count) % count === index) return form;
    }
  return scheme.forms[0];
}

// -- the whole cache ------------------------------------------------------------------------------------------------

/** Runs of layers that are stored alike: [{form or null, layer, count}]. */
function stored(model, scheme) {
  const count = model.runs.reduce((sum, run) => sum + run.count, 0), found = [];
  let index = 0;
  for (const run of model.runs)
    for (let i = 0; i < run.count; i++, index++) {
      const form = formOf(scheme, index, count), last = found[found.length - 1];
      const attention = run.layer.attention;
      const packs = attention !== null && attention.window === null && model.refusal === null;
      const one = packs ? form : null;
      if (last && last.layer === run.layer && last.form === one) last.count++;
      else found.push({ form: one, layer: run.layer, count: 1 });
    }
  return found;
}

/** Bytes, elements of packed layers, bytes of the others, and those of the largest layer. */
function cacheOf(model, parts, tokens, batch, source) {
  let bytes = 0, other = 0, elements = 0, largest = 0;
  for (const part of parts) {
    let each;
    if (part.form === null) {
      each = ownLayer(part.layer, tokens, batch, source);
      other += part.count * each;
    } else {
      const layer = packedLayer(part.form, part.layer.attention, model.itemsize, tokens, batch);
      if (layer === null) throw new Error("does not fit heads of this size");
      each = layer.bytes;
      elements += part.count * layer.elements;
    }
    bytes += part.count * each;
    largest = Math.max(largest, each);
  }
  return { bytes, largest, bits: elements ? 8 * (bytes - other) / elements : 0 };
}

/** kvbits.plan.peak, and the largest layer once more. */
function peakOf(model, context, batch, source, largest) {
  const widths = model.widths;
  if (widths === null) return 0;
  const tokens = model.encodes ? Math.max(context, source) : context;
  let channels = 0, dim = 0, windows = false;
  for (const run of model.runs) {
    const a = run.layer.attention;
    if (a === null) continue;
    channels = Math.max(channels, a.heads * (a.key + a.value));
    dim = Math.max(dim, a.key);
    windows = windows || a.window !== null;
  }
  const size = model.itemsize, mask = windows ? tokens * context : 0;
  const mlp = 4 * tokens * widths.intermediate * size + mask;
  const handed = channels < widths.expanded ? widths.expanded * context : channels * tokens;
  const attention = 2 * (tokens * widths.query + handed) * size + mask + mask * size;
  const head = widths.vocabulary * (size + 4);
  return batch * (tokens * (4 * widths.hidden + 2 * dim) * size + Math.max(mlp, attention) + head) + largest;
}

function weightsOf(model, how) {
  const weights = model.weights;
  if (how === "file") {
    if (weights === null || weights.file === null) throw new Error("the files of this model's weights are not at hand");
    return weights.file;
  }
  if (weights === null || how === "none") return 0;
  const bits = DATA.weight_bits[how] || weights.bits || 8 * model.itemsize;
  return Math.ceil((Math.max(bits, 16) * weights.outside + bits * weights.layers) / 8);
}

// -- the papers' accounting: kvbits.plan.paper ----------------------------------------------------------------------

function termBits(term, heads, channels, tokens) {
  const shared = term.per_width / (heads * channels) + term.per_channels / channels + term.per_tokens / tokens;
  const exact = (DATA.growth.exact_bits - term.code) * Math.min(tokens, term.sinks) / tokens;
  return term.code + term.each + shared + exact;
}

function paperBits(form, attention, tokens) {
  const key = termBits(form.paper[0], attention.heads, attention.key, tokens) * attention.key;
  const value = termBits(form.paper[1], attention.heads, attention.value, tokens) * attention.value;
  return (key + value) / (attention.key + attention.value);
}

function paperOf(model, scheme, tokens, batch) {
  const count = model.runs.reduce((sum, run) => sum + run.count, 0), kinds = new Map();
  let bytes = 0, index = 0;
  for (const run of model.runs)
    for (let i = 0; i < run.count; i++, index++) {
      const attention = run.layer.attention;
      if (attention === null) {
        bytes += batch * (run.layer.row + run.layer.token * tokens);
        continue;
      }
      const windowed = attention.window !== null;
      const held = windowed ? Math.min(tokens, attention.window) : tokens;
      const each = windowed ? DATA.growth.exact_bits : paperBits(formOf(scheme, index, count), attention, tokens);
      bytes += batch * held * attention.heads * (attention.key + attention.value) * each / 8;
      if (!windowed) {
        const name = JSON.stringify(attention);
        kinds.set(name, { attention, count: 1 + (kinds.get(name) || { count: 0 }).count });
      }
    }
  let usual = null;
  for (const kind of kinds.values()) if (usual === null || kind.count > usual.count) usual = kind;
  const bits = usual === null ? DATA.growth.exact_bits : paperBits(scheme.forms[0], usual.attention, tokens);
  return { bits, bytes };
}

// -- the plan: kvbits.plan.plan -------------------------------------------------------------------------------------

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

/** One scheme under a setting {model, context, batch, memory, weights}; {error} where the model refuses it. */
function planOne(model, name, setting) {
  const scheme = DATA.schemes[name];
  if (model.refusal !== null && name !== "exact") return { name, error: model.refusal };
  if (scheme.pre_rope && model.unrotatable !== null) return { name, error: model.unrotatable };
  try {
    const parts = stored(model, scheme), weights = weightsOf(model, setting.weights);
    const need = (context, batch) => {
      const cache = cacheOf(model, parts, context, batch, setting.context);
      const peak = peakOf(model, context, batch, setting.context, cache.largest);
      return { cache, peak, total: weights + cache.bytes + peak };
    };
    const now = need(setting.context, setting.batch), paper = paperOf(model, scheme, setting.context, setting.batch);
    return {
      name, weights, peak: now.peak, total: now.total, real_bytes: now.cache.bytes, real_bits: now.cache.bits,
      paper_bits: paper.bits, paper_gib: paper.bytes / 2 ** 30, fits: now.total <= setting.memory,
      max_context: most(n => need(n, setting.batch).total <= setting.memory, DATA.limits.tokens),
      max_batch: most(n => need(setting.context, n).total <= setting.memory, DATA.limits.batch),
      at: context => need(context, setting.batch).total,
    };
  } catch (error) {
    return { name, error: error.message };
  }
}

/** A model of equal layers, as kvbits.plan.shapes.of_numbers makes it. */
function modelOfNumbers(layers, heads, dim, parameters, itemsize) {
  const attention = { heads, key: dim, value: dim, window: null, token: 2 * heads * dim * itemsize };
  const layer = { attention, fixed: 0, row: 0, token: attention.token, source: 0 };
  return {
    title: "numbers of your own", runs: [{ count: layers, layer }], itemsize, widths: null, trained: null,
    weights: parameters ? { outside: 0, layers: parameters, bits: null, file: null } : null, refusal: null, unrotatable: null, encodes: false, eager: false,
  };
}
