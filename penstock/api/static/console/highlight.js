// Colours for code: cuts a text into {kind, text} pieces by the words and marks of its language. Kinds are comment,
// string, number, keyword, name (of functions), tag, added and removed; a piece without a kind is plain.
//
// One pass with one regular expression per language. Whatever it does not know stays plain, and no text is ever lost.

// Code that is longer is shown plain, and so is code with a longer word or gap: a page must never hang.
const MAX_LENGTH = 200_000;
const TOO_LONG = /\S{1000}|[^\S\n]{1000}/;

const C_COMMENT = String.raw`\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`;
const HASH_COMMENT = String.raw`#[^\n]*`;
const DOUBLE = String.raw`"(?:[^"\\\n]|\\[\s\S])*(?:"|$|(?=\n))`;
const SINGLE = String.raw`'(?:[^'\\\n]|\\[\s\S])*(?:'|$|(?=\n))`;
const NUMBER = String.raw`\b(?:0[xX][\da-fA-F_]+|0[bB][01_]+|\d[\d_]*(?:\.[\d_]+)?(?:[eE][+-]?\d+)?)\w*\b`;
const CALL = String.raw`[A-Za-z_$][\w$]*(?=\s*\()`;

const words = (text) => String.raw`\b(?:${text.trim().split(/\s+/).join("|")})\b`;

const PYTHON_WORDS = `and as assert async await break case class continue def del elif else except False finally for from
  global if import in is lambda match None nonlocal not or pass raise return True try while with yield self`;
const SCRIPT_WORDS = `abstract as async await break case catch class const continue debugger default delete do else enum
  export extends false finally for from function get if implements import in instanceof interface let new null of
  private protected public readonly return set static super switch this throw true try type typeof undefined var void
  while with yield`;
const C_WORDS = `alignas auto bool break case catch char class const constexpr continue default delete do double else enum
  explicit extern false final float for friend if import inline int interface implements extends long namespace new null nullptr
  operator override package private protected public register return short signed sizeof static struct super switch
  synchronized template this throw throws true try typedef typename union unsigned using virtual void volatile while
  string var foreach in is async await boolean byte`;
const RUST_WORDS = `as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move
  mut pub ref return self Self static struct super trait true type unsafe use where while`;
const GO_WORDS = `break case chan const continue default defer else fallthrough false for func go goto if import interface map
  nil package range return select struct switch true type var`;
const SHELL_WORDS = `if then else elif fi for in do done while until case esac function return export local set source echo cd
  exit sudo`;
const SQL_WORDS = `select from where and or not in is null as join left right inner outer full on group by order having limit
  offset insert into values update set delete create table index view drop alter add primary key foreign references
  unique default distinct union all case when then else end with exists between like asc desc count sum avg min max`;

const RULES = {
  python: { comment: HASH_COMMENT, string: String.raw`[rbfuRBFU]{0,2}(?:"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|${DOUBLE}|${SINGLE})`, keyword: words(PYTHON_WORDS), tag: String.raw`@[\w.]+`, name: CALL, number: NUMBER },
  javascript: { comment: C_COMMENT, string: String.raw`\x60(?:[^\x60\\]|\\[\s\S])*(?:\x60|$)|${DOUBLE}|${SINGLE}`, keyword: words(SCRIPT_WORDS), name: CALL, number: NUMBER },
  c: { comment: C_COMMENT, tag: String.raw`^[ \t]*#[^\n]*`, string: `${DOUBLE}|${SINGLE}`, keyword: words(C_WORDS), name: CALL, number: NUMBER },
  rust: { comment: C_COMMENT, string: String.raw`${DOUBLE}|'(?:[^'\\\n]|\\.)'`, tag: String.raw`#!?\[[^\]\n]*\]|'[a-z]\w*\b`, keyword: words(RUST_WORDS), name: String.raw`[A-Za-z_]\w*!?(?=\s*\()`, number: NUMBER },
  go: { comment: C_COMMENT, string: String.raw`\x60[^\x60]*(?:\x60|$)|${DOUBLE}|${SINGLE}`, keyword: words(GO_WORDS), name: CALL, number: NUMBER },
  bash: { comment: String.raw`(?<=^|\s)#[^\n]*`, string: String.raw`"(?:[^"\\]|\\[\s\S])*(?:"|$)|'[^']*(?:'|$)`, tag: String.raw`\$\{[^}\n]*\}|\$\w+`, keyword: words(SHELL_WORDS), name: String.raw`(?<=\s)--?[A-Za-z][\w-]*`, number: String.raw`\b\d+\b` },
  json: { name: String.raw`"(?:[^"\\\n]|\\.)*"(?=\s*:)`, string: DOUBLE, keyword: words("true false null"), number: String.raw`-?\b\d+(?:\.\d+)?(?:[eE][+-]?\d+)?\b` },
  yaml: { comment: String.raw`(?<=^|\s)#[^\n]*`, name: String.raw`^[ \t-]*[\w.\/-]+(?=\s*:(?:\s|$))`, string: `${DOUBLE}|${SINGLE}`, keyword: words("true false null yes no on off"), number: NUMBER },
  toml: { comment: HASH_COMMENT, tag: String.raw`^\s*\[\[?[^\]\n]*\]\]?`, name: String.raw`^[ \t]*[\w."-]+(?=\s*=)`, string: `"""[\\s\\S]*?(?:"""|$)|${DOUBLE}|${SINGLE}`, keyword: words("true false"), number: NUMBER },
  sql: { comment: String.raw`--[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`, string: String.raw`'(?:[^']|'')*(?:'|$)`, keyword: words(SQL_WORDS), name: CALL, number: NUMBER, ignoresCase: true },
  html: { comment: String.raw`<!--[\s\S]*?(?:-->|$)`, tag: String.raw`<\/?[A-Za-z!?][\w:.-]*|\/?>`, name: String.raw`(?<=\s)[\w:@.-]+(?==)`, string: String.raw`(?<==)"[^"]*(?:"|$)|(?<==)'[^']*(?:'|$)`, keyword: String.raw`&\w+;` },
  css: { comment: String.raw`\/\*[\s\S]*?(?:\*\/|$)`, string: `${DOUBLE}|${SINGLE}`, tag: String.raw`@[\w-]+|[.#][A-Za-z_][\w-]*(?=[^;{}]*\{)`, name: String.raw`--?[\w-]+(?=\s*:)|\b[a-z-]+(?=\s*:[^{};]*[;}])`, number: String.raw`#[\da-fA-F]{3,8}\b|-?\b\d+(?:\.\d+)?(?:%|[a-z]+)?` },
  diff: { tag: String.raw`^(?:@@[^\n]*|diff [^\n]*|index [^\n]*|(?:---|\+\+\+) [^\n]*)`, added: String.raw`^\+[^\n]*`, removed: String.raw`^-[^\n]*` },
};

const ALIASES = {
  py: "python", python3: "python", js: "javascript", jsx: "javascript", ts: "javascript", tsx: "javascript",
  typescript: "javascript", mjs: "javascript", node: "javascript", "c++": "c", cpp: "c", h: "c", cs: "c",
  csharp: "c", java: "c", kotlin: "c", swift: "c", php: "c", cuda: "c", rs: "rust", golang: "go", sh: "bash", shell: "bash",
  zsh: "bash", console: "bash", dockerfile: "bash", makefile: "bash", jsonc: "json", json5: "json", jsonl: "json", yml: "yaml",
  ini: "toml", xml: "html", svg: "html", vue: "html", scss: "css", less: "css", patch: "diff", postgresql: "sql",
  sqlite: "sql", mysql: "sql", ruby: "python", rb: "python",
};
const compiled = new Map();

function patternOf(language) {
  const name = ALIASES[language] ?? language;
  if (!Object.hasOwn(RULES, name)) return null;
  if (!compiled.has(name)) {
    const { ignoresCase, ...rules } = RULES[name];
    const source = Object.entries(rules).map(([kind, rule]) => `(?<${kind}>${rule})`).join("|");
    compiled.set(name, new RegExp(source, ignoresCase ? "gmi" : "gm"));
  }
  return compiled.get(name);
}

export function highlight(text, language) {
  const pattern = text.length > MAX_LENGTH || TOO_LONG.test(text) ? null : patternOf(String(language ?? "").toLowerCase());
  if (pattern === null) return text ? [{ kind: null, text }] : [];
  const pieces = [];
  let at = 0;
  for (const match of text.matchAll(pattern)) {
    if (!match[0]) continue;
    if (match.index > at) pieces.push({ kind: null, text: text.slice(at, match.index) });
    const kind = Object.keys(match.groups).find((name) => match.groups[name] !== undefined);
    pieces.push({ kind, text: match[0] });
    at = match.index + match[0].length;
  }
  if (at < text.length) pieces.push({ kind: null, text: text.slice(at) });
  return pieces;
}
