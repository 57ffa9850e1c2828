"use strict";
// Messages as elements of the page. Text of models and users becomes HTML only through markdown-it, which escapes HTML.

const markdown = markdownit({html: false, linkify: true, breaks: true, highlight: (code, language) =>
  language && hljs.getLanguage(language) ? hljs.highlight(code, {language, ignoreIllegals: true}).value : ""});
// The page may load nothing from elsewhere, so pictures of a text are shown as links.
markdown.renderer.rules.image = (tokens, at) => {
  const {attrs, content} = tokens[at], escape = markdown.utils.escapeHtml;
  return `<a href="${escape(attrs.find(([name]) => name === "src")[1])}">${escape(content || "picture")}</a>`;
};

// make("button", {class: "copy", type: "button", onclick: …}, "Copy"): an element, with texts and elements in it.
function make(tag, values, ...inside) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(values || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...inside.filter(each => each !== null && each !== undefined));
  return made;
}

function button(text, label, onclick) {
  return make("button", {type: "button", "aria-label": label === text ? undefined : label, title: label, onclick}, text);
}

async function copy(text, from) {
  try { await navigator.clipboard.writeText(text); } catch {
    // Pages that came by plain HTTP from another machine have no clipboard.
    const area = make("textarea", {"aria-hidden": "true", tabindex: "-1"});
    area.value = text;
    from.after(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const before = from.textContent;
  from.textContent = "Copied";
  setTimeout(() => { from.textContent = before; }, 1500);
}

// Fill `place` with a text in Markdown: code with a button that copies it, links to new tabs.
function fillMarkdown(place, text) {
  place.innerHTML = markdown.render(text);
  for (const link of place.querySelectorAll("a")) Object.assign(link, {target: "_blank", rel: "noopener noreferrer"});
  for (const table of place.querySelectorAll("table")) {
    const frame = make("div", {class: "wide", tabindex: "0", role: "group", "aria-label": "Table"});
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const block of place.querySelectorAll("pre")) {
    const code = block.querySelector("code");
    const language = (/language-(\S+)/.exec(code ? code.className : "") || [])[1] || "text";
    const copies = button("Copy", "Copy this code", () => copy(block.textContent, copies));
    const frame = make("div", {class: "code"}, make("div", {class: "bar"}, make("span", {}, language), copies));
    block.replaceWith(frame);
    block.tabIndex = 0;
    block.setAttribute("role", "group");
    block.setAttribute("aria-label", `Code: ${language}`);
    frame.append(block);
  }
}

function pretty(json) {
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; }
}

// The lines under an answer: what it took, and how it ended.
function noteOf(info) {
  const notes = [info.model, info.first !== undefined && `first text after ${info.first.toFixed(2)} s`, `${info.whole.toFixed(1)} s in all`];
  if (info.tokens) {
    notes.push(`${info.tokens} tokens`);
    const rest = info.whole - (info.first || 0);
    // What came all at once was not seen being made.
    if (info.tokens > 1 && rest > 0.1 * info.whole) notes.push(`${((info.tokens - 1) / rest).toFixed(0)} a second`);
  }
  const ends = {stop: null, tool_calls: null, length: "cut at its limit of tokens", stopped: "stopped"};
  notes.push(info.reason in ends ? ends[info.reason] : info.reason);
  return notes.filter(Boolean).join(" · ");
}

// What an answer holds. Called again for each part that arrives.
class AnswerView {
  constructor() {
    this.thought = make("div", {class: "thought"});
    this.folded = make("details", {hidden: true}, make("summary", {}, "Reasoning"), this.thought);
    this.body = make("div", {class: "body"});
    this.calls = make("div");
    this.inside = [this.folded, this.body, this.calls];
  }

  // What is shown already is left as it is: reading Markdown is what takes time.
  show(message) {
    const given = JSON.stringify([message.text, message.reasoning, message.calls]);
    if (given === this.given) return;
    this.given = given;
    this.folded.hidden = !message.reasoning;
    if (message.reasoning) fillMarkdown(this.thought, message.reasoning);
    fillMarkdown(this.body, message.text);
    this.calls.replaceChildren(...(message.calls || []).map(call => make("details", {class: "call", open: true},
      make("summary", {}, "Calls ", make("code", {}, call.name || "…")), make("pre", {tabindex: "0"}, pretty(call.arguments)))));
  }
}

const views = new WeakMap();  // of answers, by message

// The element of a message. `acts`: {copy, edit, again, choose(step), place, count}; those that are missing have no button.
function messageElement(message, acts) {
  const names = {user: "You", assistant: "Assistant", tool: "Result of a call"};
  const box = make("article", {class: `said ${message.role}`, "data-id": message.id, "aria-label": names[message.role]});
  if (message.role === "assistant") {
    const view = views.get(message) || new AnswerView();
    views.set(message, view);
    view.show(message);
    box.append(...view.inside);
    box.view = view;
  } else {
    for (const url of message.pictures || []) box.append(make("img", {src: url, alt: "A picture you sent"}));
    box.append(make("div", {class: "body"}, message.text));
  }
  if (message.error) box.append(make("p", {class: "error"}, message.error));
  const row = make("div", {class: "acts"});
  if (acts.count > 1) row.append(make("span", {class: "branches"}, button("‹", "Earlier version", () => acts.choose(-1)), ` ${acts.place + 1}/${acts.count} `,
    button("›", "Later version", () => acts.choose(1))));
  if (message.text) { const copies = button("Copy", "Copy this message", () => copy(message.text, copies)); row.append(copies); }
  if (acts.edit) row.append(button("Edit", "Edit this message", () => acts.edit(box)));
  if (acts.again) row.append(button("Again", "Answer again", acts.again));
  if (message.info) row.append(make("span", {class: "note"}, noteOf(message.info)));
  box.append(row);
  return box;
}
