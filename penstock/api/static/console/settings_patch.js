// What differs between settings, as a JSON merge patch (RFC 7396) and as lines for people. Knows no document.

// entries: [{path, before, after}], where undefined is an absent value. Only entries that differ are in the patch.
export function patchOf(entries) {
  const patch = {};
  for (const { path, before, after } of entries) {
    if (JSON.stringify(before) === JSON.stringify(after)) continue;
    let inside = patch;
    for (const step of path.slice(0, -1)) inside = own(inside, step) ?? put(inside, step, {});
    put(inside, path.at(-1), after === undefined ? null : after);
  }
  return patch;
}

// One line for each setting that differs, such as "limits.key.requests_per_minute: 600 → 900".
export function changesBetween(before, after) {
  const [old, young] = [leaves(before), leaves(after)];
  const names = [...new Set([...old.keys(), ...young.keys()])].sort();
  return names.filter((name) => old.get(name) !== young.get(name))
    .map((name) => `${name}: ${old.get(name) ?? "none"} → ${young.get(name) ?? "none"}`);
}

const own = (object, name) => (Object.hasOwn(object, name) ? object[name] : undefined);

// A name from a form may be "__proto__", which must become a key like any other.
function put(object, name, value) {
  Object.defineProperty(object, name, { value, enumerable: true, configurable: true, writable: true });
  return value;
}

function leaves(value, path = "", found = new Map()) {
  const isTable = value !== null && typeof value === "object" && !Array.isArray(value);
  if (!isTable) found.set(path, JSON.stringify(value));
  else for (const [name, inside] of Object.entries(value)) leaves(inside, path ? `${path}.${name}` : name, found);
  return found;
}
