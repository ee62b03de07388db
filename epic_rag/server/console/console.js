// Puts the page together: what is served, the key, the two views.

import { key, onRefused, request, setKey } from "./api.js";
import { startAsking } from "./ask.js";
import { list, startDocuments } from "./documents.js";
import { find } from "./dom.js";

async function showServed() {
  const served = find("served");
  try {
    const { model, version } = await (await request("health")).json();
    served.textContent = `${model} · ${version}`;
  } catch (error) {
    served.textContent = error.message;
  }
}

function showKey() {
  find("key-open").textContent = key() ? "API key set" : "API key";
}

function startKey() {
  const dialog = find("key-dialog");
  const open = (why) => {
    find("key-why").textContent = why;
    find("key").value = key();
    if (!dialog.open) dialog.showModal();
    find("key").focus();
  };
  onRefused((message) => open(message));
  find("key-open").addEventListener("click", () => open(""));
  find("key-cancel").addEventListener("click", () => dialog.close());
  find("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(find("key").value.trim());
    dialog.close();
    showKey();
    list();
  });
  showKey();
}

let decide = () => {};

/** Ask before something is deleted; resolves to whether it may be. A dialog that was left with Esc decides nothing. */
function confirmed(question) {
  decide(false);
  find("sure-title").textContent = question;
  find("sure").showModal();
  return new Promise((resolve) => {
    decide = resolve;
  });
}

function startViews() {
  const buttons = document.querySelectorAll(".views button");
  for (const one of buttons) {
    one.addEventListener("click", () => {
      document.body.dataset.view = one.dataset.view;
      for (const other of buttons) other.setAttribute("aria-pressed", `${other === one}`);
    });
  }
}

find("sure").addEventListener("submit", (event) => decide(event.submitter.value === "yes"));
startViews();
startKey();
startAsking();
startDocuments(confirmed);
showServed();
list();
// On a touch screen it would open the keyboard over the page.
if (matchMedia("(pointer: fine)").matches) find("question").focus();
