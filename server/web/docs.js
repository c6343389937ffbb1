// The API's document, shown: every operation with its fields.

import {el as make} from "./dom.js";
import {json} from "./server.js";

let spec;

const code = text => make("code", null, text);
const nameOf = reference => reference.split("/").pop();
const resolve = node => node?.$ref ? node.$ref.slice(2).split("/").reduce((at, key) => at[key.replaceAll("~1", "/").replaceAll("~0", "~")], spec) : node;

const LIMITS = {minimum: "≥ ", exclusiveMinimum: "> ", maximum: "≤ ", exclusiveMaximum: "< ", minLength: "length ≥ ", maxLength: "length ≤ ", minItems: "items ≥ ", maxItems: "items ≤ ", pattern: "matches "};

// A type in a few words; `used` collects the schemas it names.
function words(schema, used) {
  if (schema.$ref) { used.add(schema.$ref); return nameOf(schema.$ref); }
  if (schema.anyOf) return schema.anyOf.map(one => words(one, used)).join(" | ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map(one => JSON.stringify(one)).join(" | ");
  const limits = Object.entries(LIMITS).filter(([key]) => key in schema).map(([key, sign]) => sign + schema[key]);
  const limited = limits.length ? ` (${limits.join(", ")})` : "";
  if (schema.type === "array") return `array of ${schema.items ? words(schema.items, used) : "anything"}${limited}`;
  if (schema.type === "object" && typeof schema.additionalProperties === "object" && !schema.properties) return `object of ${words(schema.additionalProperties, used)}`;
  return (schema.type ?? "anything") + limited;
}

function table(caption, head, rows) {
  const top = make("tr", null, ...head.map(text => make("th", {scope: "col"}, text)));
  const body = rows.map(([first, ...rest]) => make("tr", null, make("th", {scope: "row"}, first), ...rest.map(cell => make("td", null, cell))));
  return make("div", {class: "fields", role: "region", "aria-label": caption, tabindex: "0"}, make("table", null, make("thead", null, top), make("tbody", null, ...body)));
}

// A schema with its fields, and below it, folded, those it names. `seen` ends recursion.
function show(schema, seen = new Set()) {
  const used = new Set(), whole = resolve(schema), parts = [];
  if (schema.$ref) { if (seen.has(schema.$ref)) return code(nameOf(schema.$ref)); seen = new Set([...seen, schema.$ref]); }
  if (whole.description) parts.push(make("p", {class: "dim"}, whole.description));
  if (whole.properties) {
    const rows = Object.entries(whole.properties).map(([name, field]) => [code(name), words(field, used), whole.required?.includes(name) ? "required" : "default" in field ? `default ${JSON.stringify(field.default)}` : "optional"]);
    parts.push(table(`Fields of ${schema.$ref ? nameOf(schema.$ref) : "this object"}`, ["field", "type", ""], rows));
  } else parts.push(make("p", null, code(words(whole, used))));
  for (const reference of used) if (!seen.has(reference)) parts.push(make("details", null, make("summary", null, code(nameOf(reference))), show({$ref: reference}, seen)));
  return make("div", null, ...parts);
}

function content(bodies) {
  return Object.entries(bodies ?? {}).map(([type, body]) => make("details", null, make("summary", null, code(type), body.schema.$ref ? ` ${nameOf(body.schema.$ref)}` : ""), show(body.schema)));
}

function operation(method, path, made) {
  const parts = [];
  const security = (made.security ?? spec.security ?? []).map(need => Object.keys(need).join(" and "));
  if (security.length) parts.push(make("p", null, `Needs a key: ${security.map(name => `${name} (${spec.components.securitySchemes[name].description})`).join(" or ")}`));
  const rows = made.parameters.map(resolve).map(one => [code(one.name), one.in, words(one.schema, new Set()), `${one.required ? "required. " : ""}${one.description ?? ""}`]);
  if (rows.length) parts.push(make("h4", null, "Parameters"), table("Parameters", ["name", "in", "type", ""], rows));
  if (made.requestBody) parts.push(make("h4", null, "Request"), ...content(made.requestBody.content));
  parts.push(make("h4", null, "Responses"));
  for (const [status, answer] of Object.entries(made.responses)) {
    const whole = resolve(answer);
    parts.push(make("details", null, make("summary", null, code(status), ` ${whole.description}`), ...content(whole.content)));
  }
  const summary = make("summary", null, make("h3", null, make("span", {class: "method"}, method.toUpperCase()), code(path)), make("span", {class: "dim"}, ` ${made.summary}`));
  return make("details", {id: made.operationId}, summary, ...parts);
}

function render() {
  document.getElementById("title").textContent = `${spec.info.title} ${spec.info.version}: API`;
  document.getElementById("about").replaceChildren("OpenAPI ", spec.openapi, ": ", make("a", {href: "openapi.json"}, "openapi.json"));
  for (const {name} of spec.tags) {
    const section = make("section", {"aria-labelledby": `tag-${name}`}, make("h2", {id: `tag-${name}`}, name));
    for (const [path, item] of Object.entries(spec.paths))
      for (const [method, made] of Object.entries(item)) {
        if (!made.tags.includes(name)) continue;
        section.append(operation(method, path, made));
        document.getElementById("contents").append(make("li", null, make("a", {href: `#${made.operationId}`}, code(`${method.toUpperCase()} ${path}`))));
      }
    if (section.children.length > 1) document.getElementById("operations").append(section);
  }
  open();
}

// A link to an operation opens it.
function open() { const target = location.hash && document.getElementById(location.hash.slice(1)); if (target instanceof HTMLDetailsElement) { target.open = true; target.scrollIntoView(); } }

addEventListener("hashchange", open);
try {
  spec = await json("openapi.json");
  render();
} catch (error) {
  document.getElementById("about").textContent = `openapi.json could not be shown: ${error.message}${error.wantsKey ? " (the chat page asks for the key)" : ""}`;
}
document.documentElement.dataset.ready = "true";
