// The prompt as a bar: which of its tokens were reused, and which computed.

import { count, make, percent, plural } from "./dom.js";

const KINDS = [
  ["reused", "Reused", "from compiled chunks"],
  ["recomputed", "Recomputed", "to link compiled chunks"],
  ["computed", "Computed", "outside chunks"],
];

let bars = 0;

/**
 * The prompt cut wherever a chunk or a reused span begins or ends.
 *
 * Returns [{kind, start, stop, chunk}], one behind the other from 0 to `total`; `chunk` is an index into the chunks,
 * or -1 outside them.
 */
function segmentsOf(total, chunks, spans) {
  const cuts = new Set([0, total]);
  for (const { offset, tokens } of chunks) cuts.add(offset).add(offset + tokens);
  for (const [start, stop] of spans) cuts.add(start).add(stop);
  const places = [...cuts].filter((place) => place <= total).sort((a, b) => a - b);
  return places.slice(1).map((stop, i) => {
    const start = places[i];
    const chunk = chunks.findIndex((c) => c.offset <= start && start < c.offset + c.tokens);
    const reused = spans.some(([from, to]) => from <= start && start < to);
    return { kind: reused ? "reused" : chunk >= 0 ? "recomputed" : "computed", start, stop, chunk };
  });
}

/** A legend; with segments it says how many tokens are of each kind. */
export function legend(segments) {
  const sum = (kind) =>
    segments.reduce((all, s) => all + (kind === undefined || s.kind === kind ? s.stop - s.start : 0), 0);
  const items = KINDS.map(([kind, name, meaning]) => {
    const figures = segments.length ? `${count(sum(kind))} (${percent(sum(kind), sum())})` : meaning;
    const swatch = make("span", { className: "swatch", "data-kind": kind, "aria-hidden": "true" });
    return make("li", { title: `${name}: ${meaning}`, "data-kind": kind }, swatch, make("b", {}, name), ` ${figures}`);
  });
  return make("ul", { className: "legend" }, ...items);
}

/**
 * The bar, the ruler of its chunks, its legend, and a line that tells of one segment.
 *
 * `nameOf` gives a chunk's name; `onChunk` is told the index of the chunk that is looked at, or -1.
 */
export function promptBar(total, chunks, spans, nameOf, onChunk) {
  const segments = segmentsOf(total, chunks, spans);
  const describe = ({ kind, start, stop, chunk }) => {
    const place = chunk >= 0 ? nameOf(chunk) : kind === "reused" ? "an earlier prompt" : "outside chunks";
    return `${plural(stop - start, "token")} ${kind} · ${place} · tokens ${count(start + 1)} to ${count(stop)}`;
  };
  const id = `bar-${++bars}`;
  const options = segments.map((segment, index) => {
    const option = make("span", {
      className: "segment",
      id: `${id}-${index}`,
      role: "option",
      "aria-label": describe(segment),
      "aria-selected": "false",
      "data-kind": segment.kind,
      "data-start": segment.start,
      "data-stop": segment.stop,
    });
    option.style.flexGrow = segment.stop - segment.start;
    option.classList.toggle("first", index > 0 && segment.chunk !== segments[index - 1].chunk);
    return option;
  });
  const bar = make(
    "div",
    { className: "bar", role: "listbox", tabIndex: 0, "aria-orientation": "horizontal" },
    ...options,
  );
  bar.setAttribute("aria-label", `The prompt: ${plural(total, "token")} in ${plural(segments.length, "segment")}`);
  const hint = matchMedia("(pointer: coarse)").matches
    ? "Touch the bar to see what its parts are."
    : "Point at the bar, or move along it with ← and →.";
  const detail = make("p", { className: "detail" }, hint);

  let at = -1;
  const show = (index) => {
    if (at >= 0) options[at].setAttribute("aria-selected", "false");
    at = index;
    bar.setAttribute("aria-activedescendant", at >= 0 ? options[at].id : "");
    if (at >= 0) options[at].setAttribute("aria-selected", "true");
    detail.textContent = at >= 0 ? describe(segments[at]) : hint;
    onChunk(at >= 0 ? segments[at].chunk : -1);
  };
  // By position: a segment may be narrower than a pixel.
  const under = (event) => {
    const box = bar.getBoundingClientRect();
    const token = Math.min(total - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * total)));
    return segments.findIndex((segment) => segment.start <= token && token < segment.stop);
  };
  for (const type of ["pointerdown", "pointermove"]) bar.addEventListener(type, (event) => show(under(event)));
  bar.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse" && document.activeElement !== bar) show(-1);
  });
  bar.addEventListener("focus", () => show(Math.max(at, 0)));
  bar.addEventListener("blur", () => show(-1));
  bar.addEventListener("keydown", (event) => {
    const last = segments.length - 1;
    const moves = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last };
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(Math.min(last, Math.max(0, moves[event.key])));
  });
  return make("div", { className: "prompt" }, bar, ruler(total, chunks), detail, legend(segments));
}

/** Numbers under the chunks; a chunk that is too narrow for its number has only the line. */
function ruler(total, chunks) {
  const row = make("div", { className: "ruler", "aria-hidden": "true" });
  const add = (tokens, number) => {
    const part = make("span", number ? { className: "chunk" } : {}, number ? make("span", {}, `${number}`) : "");
    part.style.flexGrow = tokens;
    row.append(part);
  };
  let place = 0;
  chunks.forEach(({ offset, tokens }, index) => {
    if (offset > place) add(offset - place, 0);
    add(tokens, index + 1);
    place = offset + tokens;
  });
  if (total > place) add(total - place, 0);
  return row;
}
