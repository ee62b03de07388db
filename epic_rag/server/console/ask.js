// The conversation: one question after the other, each answer as it is generated.

import { Turn } from "./answer.js";
import { events, request } from "./api.js";
import { legend } from "./bar.js";
import { find } from "./dom.js";

const messages = [];
let running = null;

/** Wire the composer up. */
export function startAsking() {
  const question = find("question");
  find("empty").querySelector("[data-kinds]").replaceWith(legend([]));
  find("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const asked = question.value.trim();
    if (asked && !running) ask(asked);
  });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    find("composer").requestSubmit(find("send"));
  });
  find("stop").addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) running?.abort();
  });
  find("new").addEventListener("click", () => {
    running?.abort();
    messages.length = 0;
    find("turns").replaceChildren();
    conversing(false);
    question.focus();
  });
}

function conversing(is) {
  find("empty").hidden = is;
  find("new").hidden = !is;
}

function busy(is) {
  const had = document.activeElement === find(is ? "send" : "stop");
  find("send").hidden = is;
  find("stop").hidden = !is;
  if (had) find(is ? "stop" : "send").focus();
}

function bodyFor(question) {
  return {
    messages: [...messages, { role: "user", content: question }],
    max_tokens: Number(find("longest").value),
    temperature: 0,
    stream: true,
    stream_options: { include_usage: true },
    epic: { policy: find("policy").value, retrieve: { k: Number(find("k").value) } },
  };
}

async function ask(question) {
  const body = bodyFor(question);
  const turn = new Turn(question);
  const mine = new AbortController();
  running = mine;
  busy(true);
  conversing(true);
  find("turns").append(turn.element);
  turn.element.scrollIntoView({ block: "start" });
  find("question").value = "";
  let reason = null;
  let last;
  try {
    for await (const piece of events(await request("v1/chat/completions", { json: body, signal: mine.signal }))) {
      if (piece.epic?.sources && !piece.usage) turn.showSources(piece.epic.sources);
      if (piece.usage) last = piece;
      const [choice] = piece.choices;
      if (choice?.delta.content) turn.add(choice.delta.content);
      reason = choice?.finish_reason ?? reason;
    }
    turn.finish(reason, last, body);
  } catch (error) {
    if (error.name === "AbortError") turn.finish(null);
    else failed(turn, question, error);
  } finally {
    // A new conversation may have begun meanwhile.
    if (running === mine) {
      running = null;
      busy(false);
    }
  }
  if (turn.element.isConnected && turn.text.data) {
    messages.push({ role: "user", content: question }, { role: "assistant", content: turn.text.data });
  }
}

function failed(turn, question, error) {
  turn.fail(error.message);
  if (error.status !== 401) return;
  // Nothing is lost while the key is looked for.
  turn.element.remove();
  conversing(find("turns").childElementCount > 0);
  find("question").value = question;
}
