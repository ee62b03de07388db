// Time to the first token, and against the same prompt computed in full.

import { events, request } from "./api.js";
import { button, make, plural, seconds, times } from "./dom.js";

/** Rows of one bar each; `compared` is the body of the same request to compute in full, null if this one was. */
export function timing(spent, compared) {
  const rows = make("div", { className: "times" });
  const measured = [];
  const add = (name, value) => {
    const fill = make("span", { className: "fill" });
    const track = make("span", { className: "track", "aria-hidden": "true" }, fill);
    const figure = make("span", { className: "value" }, seconds(value));
    rows.append(make("div", { className: "time" }, make("span", { className: "name" }, name), track, figure));
    measured.push({ value, fill });
    const longest = Math.max(...measured.map((one) => one.value));
    for (const one of measured) one.fill.style.width = `${(100 * one.value) / longest}%`;
  };
  add("This answer", spent.first_token);
  const stages = `waiting ${seconds(spent.queued)}, loading KV ${seconds(spent.load)}, computing ${seconds(spent.link)}`;
  const note = make("p", { className: "verdict", role: "status" });
  const section = make(
    "section",
    { className: "timing" },
    make("h4", {}, "Time to the first token"),
    rows,
    make("p", { className: "detail" }, `Of this answer: ${stages}.`),
    note,
  );
  if (compared) section.append(comparison(compared, spent.first_token, add, note));
  return section;
}

function comparison(body, first, add, note) {
  let running = null;
  const ask = button("Compare with full prefill", async () => {
    if (running) {
      running.abort();
      return;
    }
    running = new AbortController();
    ask.textContent = "Stop measuring";
    note.classList.remove("error");
    note.textContent = "Computing the whole prompt…";
    try {
      const { epic, usage } = await fullPrefill(body, running.signal);
      const full = epic.times.first_token;
      add("Full prefill", full);
      const verdict =
        full >= first
          ? `This answer began ${times(full / first)} sooner than with full prefill`
          : `Full prefill was ${times(first / full)} faster this time`;
      note.textContent = `${verdict} of ${plural(usage.prompt_tokens, "token")}. One run each.`;
      if (document.activeElement === ask) {
        note.tabIndex = -1;
        note.focus();
      }
      ask.remove();
    } catch (error) {
      note.classList.toggle("error", error.name !== "AbortError");
      note.textContent = error.name === "AbortError" ? "" : error.message;
      ask.textContent = "Compare with full prefill";
    } finally {
      running = null;
    }
  });
  return ask;
}

/** What the last piece of an answer says of it; the prompt computed in full, and one token. */
async function fullPrefill(body, signal) {
  const json = { ...body, max_tokens: 1, epic: { ...body.epic, policy: "full" } };
  let last;
  for await (const piece of events(await request("v1/chat/completions", { json, signal }))) last = piece;
  return last;
}
