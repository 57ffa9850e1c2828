// markdown-it without what writes HTML entities. `npm install && npm run build` here makes markdown-it.min.js.
import MarkdownIt from "markdown-it";

globalThis.markdownit = (options) => new MarkdownIt(options);
