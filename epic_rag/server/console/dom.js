// Elements and figures. Texts of documents, answers and errors become text nodes and nothing else.

export const find = (id) => document.getElementById(id);

/** An element with properties, attributes (aria-…, data-…) and children; strings among them become text. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** A button that does something. */
export function button(text, act, properties = {}) {
  const made = make("button", { type: "button", ...properties }, text);
  made.addEventListener("click", act);
  return made;
}

const whole = new Intl.NumberFormat("en");

export const count = (number) => whole.format(number);

export const plural = (number, one) => `${count(number)} ${one}${number === 1 ? "" : "s"}`;

/** A time to about three digits. */
export function seconds(value) {
  if (value < 0.001) return "under 1 ms";
  if (value < 0.01) return `${(1000 * value).toFixed(1)} ms`;
  if (value < 1) return `${(1000 * value).toFixed(0)} ms`;
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

/** How many times something is another: two digits are all that one measurement bears. */
export const times = (ratio) => `${ratio < 10 ? ratio.toFixed(1) : count(Math.round(ratio))}×`;

export const percent = (part, all) => `${all ? Math.round((100 * part) / all) : 0} %`;

/** The last part of a document's id where that is a path; the whole of it otherwise. */
export const shortName = (id) => id.split(/[\\/]/).findLast((part) => part) ?? id;
