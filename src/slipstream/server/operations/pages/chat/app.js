"use strict";
// The page: conversations beside, messages, the box to write in. One answer streams at a time.

const at = id => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"], TEXTS = ["system", "tools", "reasoning_effort"];
let store = null, conversations = [], shown = null, stopper = null, pictures = [];

// ---- the server ----

function key() { try { return sessionStorage.getItem("slipstream-key") || ""; } catch { return ""; } }
function headers() { return key() ? {authorization: "Bearer " + key()} : {}; }

async function failure(answer) {
  try { return (await answer.json()).error.message; } catch { return `the server says ${answer.status}`; }
}

async function findModels() {
  try {
    const answer = await fetch("v1/models", {headers: headers()});
    const refused = answer.status === 401 || answer.status === 403;
    at("ask").hidden = !refused;
    if (!answer.ok) return tell(refused && !key() ? "" : await failure(answer));
    tell("");
    const told = await answer.json();
    at("model").replaceChildren(...told.data.map(model => new Option(model.id, model.id)));
    showSettings();
  } catch (error) { tell(`No answer: ${error.message}`); }
}

// Throws an Error that names the setting that is wrong.
function requestBody() {
  const {settings} = shown;
  const made = {model: at("model").value, messages: shown.request(), stream: true, stream_options: {include_usage: true}};
  for (const name of NUMBERS) if (settings[name] !== undefined && settings[name] !== "") made[name] = Number(settings[name]);
  if (settings.reasoning_effort) made.reasoning_effort = settings.reasoning_effort;
  if ((settings.tools || "").trim()) {
    try { made.tools = JSON.parse(settings.tools); } catch (error) { throw new Error(`Settings, tools: ${error.message}`); }
    if (!Array.isArray(made.tools)) throw new Error("Settings, tools: give a list, [{\"type\": \"function\", \"function\": {…}}]");
    made.tools = made.tools.map(tool => tool.function ? tool : {type: "function", function: tool});
  }
  return made;
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const {done, value} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter(line => line.startsWith("data:")).map(line => line.slice(5).trimStart()).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function takeCalls(message, parts) {
  for (const part of parts) {
    const calls = message.calls ||= [], call = calls[part.index] ||= {id: "", name: "", arguments: ""};
    call.id = part.id || call.id;
    call.name += part.function?.name || "";
    call.arguments += part.function?.arguments || "";
  }
}

// Ask for the next message of the conversation that is shown, and show it as it comes.
async function answer() {
  const talk = shown, begin = performance.now();
  let body;
  try { body = requestBody(); } catch (error) { return tell(error.message); }
  tell("");
  const message = talk.add(talk.last(), {role: "assistant", info: {model: body.model, whole: 0, reason: null}});
  const {info} = message;
  stopper = new AbortController();
  setBusy(true);
  showTalk();
  const box = at("talk").querySelector(`[data-id="${message.id}"]`);
  let waiting = 0;
  // Markdown is read anew for each showing, so a long answer is shown more rarely.
  const show = () => {
    waiting = 0;
    const started = performance.now(), low = atEnd();
    box.view.folded.open = !message.text;
    box.view.show(message);
    if (low) toEnd();
    show.pause = 4 * (performance.now() - started);
  };
  show.pause = 0;
  try {
    const told = await fetch("v1/chat/completions", {method: "POST", headers: {...headers(), "content-type": "application/json"}, body: JSON.stringify(body), signal: stopper.signal});
    if (!told.ok) throw new Error(await failure(told));
    for await (const part of events(told)) {
      if (part.error) throw new Error(part.error.message);
      if (part.usage) info.tokens = part.usage.completion_tokens;
      const choice = (part.choices || [])[0];
      if (!choice) continue;
      info.reason = choice.finish_reason || info.reason;
      const {delta} = choice, thought = delta.reasoning_content || delta.reasoning || "", said = delta.content || "";
      if (info.first === undefined && (said || thought || delta.tool_calls)) info.first = (performance.now() - begin) / 1000;
      if (thought) message.reasoning = (message.reasoning || "") + thought;
      message.text += said;
      if (delta.tool_calls) takeCalls(message, delta.tool_calls);
      waiting ||= setTimeout(show, show.pause);
    }
    if (info.reason === null) message.error = "The answer broke off.";
  } catch (error) {
    if (error.name === "AbortError") info.reason = "stopped"; else message.error = error.message;
  } finally {
    clearTimeout(waiting);
    stopper = null;
    info.whole = (performance.now() - begin) / 1000;
    const empty = !message.text && !message.reasoning && !message.calls;
    if (empty && message.error) delete message.info;
    setBusy(false);
    keep(talk);
    if (talk === shown) { const low = atEnd(); showTalk(); if (low) toEnd(); }
    at("said").textContent = message.error ? `Error: ${message.error}` : "The answer is complete.";
  }
}

// ---- what is shown ----

function tell(text) { at("problem").textContent = text; at("problem").hidden = !text; }
function atEnd() { const {scrollHeight, scrollTop, clientHeight} = at("talk"); return scrollHeight - scrollTop - clientHeight < 80; }
function toEnd() { at("talk").scrollTop = at("talk").scrollHeight; }

function setBusy(busy) {
  at("go").hidden = busy;
  at("stop").hidden = !busy;
  at("talk").setAttribute("aria-busy", busy);
}

function showTalk() {
  at("title").textContent = document.title = shown.name();
  const path = shown.path(), following = shown.following();
  at("talk").replaceChildren(...path.map(message => {
    const versions = following.get(message.parent), place = versions.indexOf(message), acts = {place, count: versions.length};
    const streams = stopper && message === path.at(-1);
    acts.choose = step => { if (!stopper) { shown.chosen[message.parent] = versions[(place + step + versions.length) % versions.length].id; keep(shown); showTalk(); } };
    if (!streams && message.role !== "tool") acts.edit = box => edit(message, box);
    if (!streams && message.role === "assistant") acts.again = () => { if (!stopper) again(message); };
    return messageElement(message, acts);
  }));
  const open = path.at(-1);
  if (open?.calls && !stopper) at("talk").append(resultsForm(open));
  if (!path.length) at("talk").append(make("p", {class: "empty"}, "Ask something. Conversations stay in this browser."));
}

function showList() {
  const wanted = at("find").value.trim().toLowerCase();
  const holds = each => !wanted || each.name().toLowerCase().includes(wanted) || Object.values(each.messages).some(message => message.text.toLowerCase().includes(wanted));
  at("list").replaceChildren(...conversations.filter(holds).map(each => make("li", {},
    make("button", {type: "button", class: "open", "aria-current": each === shown ? "true" : undefined, onclick: () => open(each)}, each.name()),
    button("✕", `Delete ${each.name()}`, () => forget(each)))));
}

function showSettings() {
  for (const name of [...NUMBERS, ...TEXTS]) at(name).value = shown.settings[name] ?? "";
  at("name").value = shown.title;
  const models = [...at("model").options].map(option => option.value);
  if (models.includes(shown.settings.model)) at("model").value = shown.settings.model;
}

function open(conversation) {
  if (stopper) stopper.abort();
  shown = conversation;
  tell("");
  showSettings();
  showTalk();
  showList();
  toEnd();
  setSide(false);
}

function setSide(wanted) {
  document.body.classList.toggle("side", wanted);
  at("menu").setAttribute("aria-expanded", wanted);
}

// ---- what one does ----

// A conversation without messages is not kept.
function keep(conversation) {
  if (Object.keys(conversation.messages).length) {
    if (!conversations.includes(conversation)) conversations.unshift(conversation);
    store.put(conversation).catch(error => tell(`This browser keeps no conversations: ${error.message}`));
  }
  showList();
}

function begin() {
  open(new Conversation({settings: {...(shown ? shown.settings : {})}}));
  at("text").focus();
}

function forget(conversation) {
  if (!confirm(`Delete “${conversation.name()}”?`)) return;
  if (conversation === shown && stopper) stopper.abort();
  conversations = conversations.filter(each => each !== conversation);
  store.remove(conversation);
  if (conversation === shown) begin(); else showList();
}

function send() {
  const text = at("text").value.trim();
  if (stopper || (!text && !pictures.length)) return;
  try { requestBody(); } catch (error) { return tell(error.message); }  // the text stays in its box
  shown.add(answered(shown.last()), {role: "user", text, pictures});
  at("text").value = "";
  setPictures([]);
  keep(shown);
  answer().then(() => at("text").focus());
  toEnd();
}

// The last message that a new question can follow: one that failed is left out together with its question.
function answered(last) {
  const failed = last?.role === "assistant" && !last.text && !last.calls;
  return failed ? answered(shown.messages[shown.messages[last.parent]?.parent]) : last;
}

function again(message) {
  const talk = shown;
  delete talk.chosen[message.parent];
  answer().then(() => { talk.chosen[message.parent] ||= message.id; });
}

// Editing makes another version, and leaves the old one as it was. A question is then answered.
function edit(message, box) {
  const area = make("textarea", {"aria-label": "Edited text", rows: Math.min(12, message.text.split("\n").length + 1)});
  area.value = message.text;
  const done = () => {
    if (stopper) return;
    shown.add(shown.messages[message.parent], {...message, id: newId(), text: area.value, info: undefined, error: undefined});
    keep(shown);
    showTalk();
    if (message.role === "user") answer();
  };
  const form = make("form", {class: "edit", onsubmit: event => { event.preventDefault(); done(); }}, area,
    make("button", {}, message.role === "user" ? "Send" : "Save"), button("Cancel", "Cancel", showTalk));
  area.addEventListener("keydown", event => {
    if (event.key === "Escape") showTalk();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && message.role === "user") { event.preventDefault(); done(); }
  });
  box.querySelector(":scope > .body").replaceWith(form);
  box.querySelector(".acts").hidden = true;
  area.focus();
}

// A form for what the called functions return. The page runs none itself.
function resultsForm(message) {
  const areas = message.calls.map(call => make("textarea", {rows: 2, "aria-label": `Result of ${call.name}`, placeholder: `What ${call.name} returns`, required: true}));
  return make("form", {class: "results", onsubmit: event => {
    event.preventDefault();
    if (stopper) return;
    let parent = message;
    message.calls.forEach((call, i) => { parent = shown.add(parent, {role: "tool", callId: call.id, text: areas[i].value}); });
    keep(shown);
    answer();
  }}, ...areas, make("button", {}, "Send results"));
}

function setPictures(found) {
  pictures = found;
  at("pictures").hidden = !found.length;
  at("pictures").replaceChildren(...found.map((url, i) => make("span", {}, make("img", {src: url, alt: `Picture ${i + 1}`}),
    button("✕", `Remove picture ${i + 1}`, () => setPictures(pictures.filter((_, j) => j !== i))))));
}

async function takeFiles(files) {
  const read = file => new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
  const found = [...files].filter(file => file.type.startsWith("image/"));
  if (files.length > found.length) tell("Only pictures can be added here.");
  setPictures([...pictures, ...await Promise.all(found.map(read))]);
}

function download(name, type, text) {
  const link = make("a", {href: URL.createObjectURL(new Blob([text], {type})), download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function bring(file) {
  try {
    const read = Conversation.read(await file.text());
    keep(read);
    open(read);
  } catch (error) { tell(`${file.name}: ${error.message}`); }
}

// ---- events ----

at("send").addEventListener("submit", event => { event.preventDefault(); send(); });
at("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  const mine = shown.path().filter(message => message.role === "user").at(-1);
  if (event.key === "ArrowUp" && !at("text").value && mine && !stopper) {
    event.preventDefault();
    edit(mine, at("talk").querySelector(`[data-id="${mine.id}"]`));
  }
});
addEventListener("keydown", event => {
  if (event.key !== "Escape") return;
  if (document.body.classList.contains("side")) setSide(false); else if (stopper) stopper.abort();
});
at("text").addEventListener("paste", event => {
  if (event.clipboardData.files.length) { event.preventDefault(); takeFiles(event.clipboardData.files); }
});
at("picture").addEventListener("change", () => { takeFiles(at("picture").files); at("picture").value = ""; });
addEventListener("dragover", event => event.preventDefault());
addEventListener("drop", event => { event.preventDefault(); takeFiles(event.dataTransfer.files); });
at("stop").addEventListener("click", () => stopper && stopper.abort());
at("new").addEventListener("click", begin);
at("find").addEventListener("input", showList);
at("menu").addEventListener("click", () => setSide(!document.body.classList.contains("side")));
at("set").addEventListener("click", () => {
  at("settings").hidden = !at("settings").hidden;
  at("set").setAttribute("aria-expanded", !at("settings").hidden);
});
for (const name of [...NUMBERS, ...TEXTS, "model"]) at(name).addEventListener("input", () => { shown.settings[name] = at(name).value; keep(shown); });
at("name").addEventListener("input", () => { shown.title = at("name").value; at("title").textContent = document.title = shown.name(); keep(shown); });
at("as-text").addEventListener("click", () => download(`${shown.name()}.md`, "text/markdown", shown.markdown()));
at("as-json").addEventListener("click", () => download(`${shown.name()}.json`, "application/json", JSON.stringify(shown, null, 1)));
at("bring").addEventListener("change", () => { if (at("bring").files[0]) bring(at("bring").files[0]); at("bring").value = ""; });
at("ask").addEventListener("submit", event => {
  event.preventDefault();
  try { sessionStorage.setItem("slipstream-key", at("key").value.trim()); } catch { /* kept nowhere then */ }
  findModels();
});

Store.open().then(async found => {
  store = found;
  conversations = await store.all();
  begin();
  await findModels();
});
