"use strict";
// Sends what is written in a form of /docs, with the reader's key, and shows the answer as it comes.

function saved() { try { return sessionStorage.getItem("slipstream-key") || ""; } catch { return ""; } }
const key = document.getElementById("key");
if (key) {
  key.value = saved();
  key.addEventListener("input", () => { try { sessionStorage.setItem("slipstream-key", key.value.trim()); } catch { /* kept nowhere then */ } });
}
const headers = () => saved() ? {authorization: "Bearer " + saved()} : {};

// The first model's name, for the examples of bodies.
let model = null;
async function findModel() {
  if (model === null) {
    const answer = await fetch("v1/models", {headers: headers()});
    if (answer.ok) model = (await answer.json()).data[0].id;
  }
  return model;
}

async function send(form, shown) {
  const {path, verb} = form.dataset, body = form.elements.body;
  const address = path.slice(1).replace("{id}", () => encodeURIComponent(form.elements.id.value));
  const query = [...form.querySelectorAll("[data-query]")].filter(each => each.value).map(each => `${each.name}=${encodeURIComponent(each.value)}`).join("&");
  const asked = {method: verb.toUpperCase(), headers: headers()};
  if (body) Object.assign(asked, {body: body.value, headers: {...asked.headers, "content-type": "application/json"}});
  const begin = performance.now();
  try {
    const answer = await fetch(query ? `${address}?${query}` : address, asked);
    shown.textContent = `${answer.status} ${answer.statusText} after ${Math.round(performance.now() - begin)} ms\n\n`;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part; !(part = await reader.read()).done;) shown.append(part.value);
    const [head, text] = [shown.textContent.slice(0, shown.textContent.indexOf("\n\n") + 2), shown.textContent.slice(shown.textContent.indexOf("\n\n") + 2)];
    try { shown.textContent = head + JSON.stringify(JSON.parse(text), null, 2); } catch { /* no JSON: as it came */ }
  } catch (error) { shown.textContent = `No answer: ${error.message}`; }
}

for (const form of document.querySelectorAll("form[data-path]")) {
  form.parentElement.addEventListener("toggle", async () => {
    const body = form.elements.body, name = body && body.value.includes('"MODEL"') && await findModel();
    if (name) body.value = body.value.replace('"MODEL"', () => JSON.stringify(name));
  }, {once: true});
  form.addEventListener("submit", event => {
    event.preventDefault();
    const shown = form.querySelector("pre");
    shown.hidden = false;
    shown.textContent = "…";
    send(form, shown);
  });
}
