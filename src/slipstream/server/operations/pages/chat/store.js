"use strict";
// Conversations. Each is a tree of messages: an edited question or a new answer is a sibling of the old one.
// They are kept in this browser's IndexedDB, or in memory where the browser has none.

// crypto.randomUUID does not exist on pages that came by plain HTTP from another machine.
function newId() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map(byte => byte.toString(16).padStart(2, "0")).join("");
}

class Conversation {
  // `messages` by id: {id, parent, role, text, pictures, reasoning, calls, callId, info, error}.
  // `chosen`: for each message's id ("" stands above the first), which of its children is shown.
  constructor(saved) {
    Object.assign(this, {id: newId(), title: "", changed: Date.now(), settings: {}, messages: {}, chosen: {}}, saved);
  }

  add(parent, message) {
    const added = {id: newId(), parent: parent ? parent.id : "", text: "", ...message};
    this.messages[added.id] = added;
    this.chosen[added.parent] = added.id;
    this.changed = Date.now();
    return added;
  }

  // The messages shown, the first one first.
  path() {
    const found = [];
    for (let id = this.chosen[""]; id; id = this.chosen[id]) found.push(this.messages[id]);
    return found;
  }

  last() { return this.path().at(-1); }

  // The messages that follow each message, by its id.
  following() {
    const found = new Map();
    for (const message of Object.values(this.messages)) {
      if (!found.has(message.parent)) found.set(message.parent, []);
      found.get(message.parent).push(message);
    }
    return found;
  }

  name() {
    const first = Object.values(this.messages).find(message => message.role === "user");
    return this.title || (first && first.text.trim().split("\n")[0].slice(0, 60)) || "New chat";
  }

  // What the server is sent: the system message and the messages shown.
  request() {
    const sent = [];
    if ((this.settings.system || "").trim()) sent.push({role: "system", content: this.settings.system});
    for (const message of this.path()) {
      if (message.role === "user") {
        const pictures = (message.pictures || []).map(url => ({type: "image_url", image_url: {url}}));
        sent.push({role: "user", content: pictures.length ? [...pictures, {type: "text", text: message.text}] : message.text});
      } else if (message.role === "tool") {
        sent.push({role: "tool", tool_call_id: message.callId, content: message.text});
      } else {
        const said = {role: "assistant", content: message.text};
        if (message.reasoning) said.reasoning_content = message.reasoning;
        if (message.calls) said.tool_calls = message.calls.map(call => ({id: call.id, type: "function", function: {name: call.name, arguments: call.arguments}}));
        sent.push(said);
      }
    }
    return sent;
  }

  markdown() {
    const names = {user: "You", assistant: "Assistant", tool: "Result of a call"};
    const parts = [`# ${this.name()}`];
    if (this.settings.system) parts.push(`## System\n\n${this.settings.system}`);
    for (const message of this.path()) {
      const calls = (message.calls || []).map(call => `\n\nCalls \`${call.name}\` with \`${call.arguments}\``).join("");
      parts.push(`## ${names[message.role]}\n\n${message.text}${calls}`);
    }
    return parts.join("\n\n") + "\n";
  }

  // A conversation from an exported file, made of what it should have. Throws an Error that says what is wrong with it.
  static read(text) {
    const given = JSON.parse(text), isObject = each => each !== null && typeof each === "object" && !Array.isArray(each);
    const fits = isObject(given) && isObject(given.messages) && isObject(given.chosen) && isObject(given.settings ?? {});
    if (!fits) throw new Error("this is not a conversation that was exported here as JSON");
    const messages = {}, chosen = {}, children = new Map();
    for (const message of Object.values(given.messages)) {
      const known = isObject(message) && ["user", "assistant", "tool"].includes(message.role) && typeof message.text === "string";
      if (!known) throw new Error("a message has no text, or a role that is not user, assistant or tool");
      if (!children.has(message.parent)) children.set(message.parent, []);
      children.get(message.parent).push(message);
    }
    // From the first ones down, so that nothing follows itself. Ids are new: a file's may be names that objects have anyway.
    const levels = [{old: "", id: ""}];
    for (const {old, id} of levels) {
      for (const message of children.get(old) || []) {
        const read = readMessage(message, id);
        messages[read.id] = read;
        if (!(id in chosen) || (Object.hasOwn(given.chosen, old) && given.chosen[old] === message.id)) chosen[id] = read.id;
        levels.push({old: message.id, id: read.id});
      }
      children.delete(old);
    }
    if (children.size) throw new Error("a message follows none that the file has");
    const settings = Object.fromEntries(Object.entries(given.settings ?? {}).filter(([, value]) => typeof value === "string"));
    return new Conversation({title: String(given.title || ""), changed: Number(given.changed) || Date.now(), settings, messages, chosen});
  }
}

// A message of a file, with a new id.
function readMessage(given, parent) {
  const of = (kind, from, names) => Object.fromEntries(names.filter(name => typeof from[name] === kind).map(name => [name, from[name]]));
  const list = each => Array.isArray(each) ? each : [];
  const read = {id: newId(), parent, ...of("string", given, ["role", "text", "reasoning", "callId", "error"])};
  read.pictures = list(given.pictures).filter(url => typeof url === "string" && /^data:image\//.test(url));
  const calls = list(given.calls).filter(call => call !== null && typeof call === "object");
  if (calls.length) read.calls = calls.map(call => ({id: "", name: "", arguments: "", ...of("string", call, ["id", "name", "arguments"])}));
  const info = given.info ?? {};
  if (typeof info.whole === "number") read.info = {reason: null, ...of("number", info, ["first", "whole", "tokens"]), ...of("string", info, ["model", "reason"])};
  return read;
}

class Store {
  constructor(database) { this.database = database; }

  // Never fails: without a database, nothing outlives the page.
  static open() {
    return new Promise(resolve => {
      let request;
      try { request = indexedDB.open("slipstream-chat", 1); } catch { return resolve(new Store(null)); }
      request.onupgradeneeded = () => request.result.createObjectStore("conversations", {keyPath: "id"});
      request.onsuccess = () => resolve(new Store(request.result));
      request.onerror = request.onblocked = () => resolve(new Store(null));
    });
  }

  run(mode, work) {
    if (!this.database) return Promise.resolve([]);
    return new Promise((resolve, reject) => {
      const request = work(this.database.transaction("conversations", mode).objectStore("conversations"));
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => reject(request.error);
    });
  }

  async all() {
    const saved = await this.run("readonly", store => store.getAll());
    return saved.map(each => new Conversation(each)).sort((a, b) => b.changed - a.changed);
  }

  put(conversation) { return this.run("readwrite", store => store.put({...conversation})); }
  remove(conversation) { return this.run("readwrite", store => store.delete(conversation.id)); }
}
