// One question and its answer: text, what the prompt was made of, times, sources.

import { promptBar } from "./bar.js";
import { button, make, plural, shortName } from "./dom.js";
import { timing } from "./timing.js";

let turns = 0;

const LONG = 240;

/** Shows one turn of a conversation; `element` is its article. */
export class Turn {
  constructor(question) {
    const id = `question-${++turns}`;
    this.text = document.createTextNode("");
    this.answer = make("p", { className: "answer", "aria-live": "polite", "aria-busy": "true" }, this.text);
    this.note = make("p", { className: "note", role: "status" }, "Looking for sources and linking them…");
    this.figures = make("div", { className: "figures", hidden: true });
    this.cards = [];
    this.sources = [];
    this.element = make(
      "article",
      { className: "turn", "aria-labelledby": id },
      make("h3", { id, className: "question" }, question),
      this.answer,
      this.note,
      this.figures,
    );
  }

  /** The sources, which come before the first token. */
  showSources(sources) {
    this.sources = sources;
    this.cards = sources.map((source, index) => card(source, index + 1));
    const title = make("h4", {}, plural(sources.length, "source"));
    const list = make("ol", { className: "sources" }, ...this.cards);
    this.element.append(make("section", {}, title, list));
  }

  /** The next piece of the answer. */
  add(text) {
    this.note.textContent = "";
    this.text.appendData(text);
  }

  /** The end; without `epic` the answer was stopped before it. */
  finish(reason, { epic, usage } = {}, asked = {}) {
    this.answer.setAttribute("aria-busy", "false");
    this.note.textContent = "";
    if (!epic) {
      this.note.textContent = "Stopped.";
      return;
    }
    if (!this.text.data) this.note.textContent = "The model ended its answer at once.";
    if (reason === "length") this.note.textContent = `Cut after ${plural(usage.completion_tokens, "token")}.`;
    if (epic.timed_out) this.note.textContent = "Cut: the server's time for an answer was over.";
    if (!this.cards.length) this.element.append(make("p", { className: "note" }, "There are no documents to answer from."));
    const bar = promptBar(
      usage.prompt_tokens,
      epic.chunks,
      epic.reused_spans,
      (index) => this.nameOf(epic.chunks[index].id),
      (index) => this.light(index < 0 ? null : epic.chunks[index].id),
    );
    const title = `Prompt of ${plural(usage.prompt_tokens, "token")}, ${reuseOf(epic)}`;
    const compared = epic.policy === "full" ? null : asked;
    this.figures.append(make("section", {}, make("h4", {}, title), bar), timing(epic.times, compared));
    this.figures.hidden = false;
  }

  /** An error, in the server's words. */
  fail(message) {
    this.answer.setAttribute("aria-busy", "false");
    this.note.className = "error";
    this.note.setAttribute("role", "alert");
    this.note.textContent = message;
  }

  nameOf(chunk) {
    const index = this.sources.findIndex((source) => source.chunk_id === chunk);
    return index < 0 ? chunk : `source ${index + 1}, ${shortName(this.sources[index].source)}`;
  }

  /** Show which source a chunk is. */
  light(chunk) {
    this.cards.forEach((one, index) => one.classList.toggle("lit", this.sources[index].chunk_id === chunk));
  }
}

function reuseOf({ reuse, policy }) {
  const kinds = { exact: "reused exactly", composed: "reused and linked", none: "nothing reused" };
  return `${kinds[reuse]} (${policy})`;
}

function card(source, number) {
  const text = make("p", { className: "text" }, source.text);
  const head = make(
    "div",
    { className: "head" },
    make("span", { className: "number" }, `${number}`),
    make("strong", { title: source.source }, shortName(source.source)),
    make("span", { className: "score" }, `similarity ${source.score.toFixed(2)}`),
  );
  const made = make("li", { className: "card" }, head, text);
  if (source.text.length > LONG) {
    made.classList.add("cut");
    const more = button(
      "Show all",
      () => {
        const cut = made.classList.toggle("cut");
        more.textContent = cut ? "Show all" : "Show less";
        more.setAttribute("aria-expanded", `${!cut}`);
      },
      { className: "quiet", "aria-expanded": "false", "aria-label": `Show all of source ${number}` },
    );
    made.append(more);
  }
  return made;
}
