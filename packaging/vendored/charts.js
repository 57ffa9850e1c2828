// What dashboard.js uses of Observable Plot and d3. `python packaging/vendored/build.py` makes charts.min.js.
import {cell, dot, legend, line, plot, pointer, ruleX, ruleY, text, tip} from "@observablehq/plot";
import {ascending, deviation, extent, format, group, groups, max, mean, min, rollups, sort} from "d3";

globalThis.Plot = {cell, dot, legend, line, plot, pointer, ruleX, ruleY, text, tip};
globalThis.d3 = {ascending, deviation, extent, format, group, groups, max, mean, min, rollups, sort};
