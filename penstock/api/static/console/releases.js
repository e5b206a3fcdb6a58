// Releases: start a new revision of a model, watch its steps and gates, promote it or roll it back.

import { announce, append, badge, confirm, element, field, heading, panel, problem, repeat, replace, select, table } from "./dom.js";
import { number, seconds, share, time } from "./format.js";

const STEPS = [["warming", "Warming"], ["shadow", "Shadow"], ["canary", "Canary"], ["lame_duck", "Lame duck"], ["promoted", "Promoted"]];
const RESULTS = { passed: "good", failed: "bad", undecided: "warn" };

export async function show(root, { api, signal }) {
  const complaint = element("div", { "aria-live": "polite" });
  const list = element("div");
  const form = element("form", { class: "panel", "aria-label": "Start a release" });
  let models = [];

  async function load() {
    try {
      const [releases, cluster] = await Promise.all([api("/admin/releases", { signal }), api("/admin/cluster", { signal })]);
      draw(releases.data);
      const found = [...new Set(cluster.pools.map((pool) => pool.model))];
      if (found.join() !== models.join()) { models = found; drawForm(); }
    } catch (error) {
      if (!signal.aborted) replace(complaint, problem(error));
    }
  }

  async function order(path, body, sentence) {
    complaint.replaceChildren();
    try {
      await api(path, { method: "POST", body });
      announce(sentence);
      await load();
    } catch (error) {
      if (!signal.aborted) replace(complaint, problem(error));
    }
  }

  function draw(releases) {
    if (list.contains(document.activeElement)) return;
    replace(list, releases.length ? releases.map(drawRelease)
      : panel("No releases", element("p", { class: "soft" }, "Start one below: other weights, or other engine settings, go into service step by step beside the stable revision, and are rolled back when they do worse.")));
  }

  function drawRelease(release) {
    const hasFailed = release.stage === "rolled_back" || release.stage === "rolling_back";
    const reached = STEPS.findIndex(([name]) => name === release.stage);
    const steps = element("ol", { class: "steps" }, STEPS.map(([name, title], index) => element("li", {
      class: index < reached || release.stage === "promoted" ? "done" : index === reached ? "now" : null, "aria-current": index === reached ? "step" : null },
    name === "canary" && index === reached ? `${title} ${share(release.candidate_share)}` : title)));
    return element("section", { class: "panel", "aria-label": `Release of ${release.model}` },
      element("div", { class: "row spread" }, element("h2", {}, `${release.model}: `, element("code", {}, release.stable), " → ", element("code", {}, release.candidate)),
        badge(release.stage.replaceAll("_", " "), hasFailed ? "bad" : release.stage === "promoted" ? "good" : "accent")),
      hasFailed ? null : steps,
      release.reason && element("p", { class: hasFailed ? "problem" : "soft" }, release.reason),
      element("dl", { class: "facts" }, [
        ["Began", time(release.started_at, true)], ["This stage since", time(release.since, true)],
        ["Candidate's share", share(release.candidate_share)], ["Mirrored", share(release.mirrored_share)],
        ["Requests, stable", number(release.num_stable_requests)], ["Requests, candidate", number(release.num_candidate_requests)],
        ["Answers compared", `${number(release.num_compared)}, ${number(release.num_diverged)} differ`],
      ].map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)))),
      release.gates.length ? table("Gates", [
        { title: "Gate", cell: (row) => row.gate },
        { title: "Result", cell: (row) => badge(row.result, RESULTS[row.result]) },
        { title: "Samples", cell: (row) => row.sentence },
      ], release.gates) : null,
      release.is_over ? null : element("div", { class: "row end" },
        element("button", { class: "danger", onclick: () => act(release, "rollback", "Roll back?", `The stable revision answers everything again, and the replicas of ${release.candidate} are drained.`, "Roll back") }, "Roll back"),
        element("button", { class: "primary", onclick: () => act(release, "promote", "Promote now?", `${release.candidate} answers everything from now on, whatever the gates say.`, "Promote") }, "Promote now")));
  }

  async function act(release, action, title, sentence, label) {
    if (await confirm(title, sentence, label)) {
      document.activeElement?.blur();
      order(`/admin/releases/${action}`, { model: release.model }, `${label}: done.`);
    }
  }

  function drawForm() {
    form.replaceChildren();
    append(form, [element("h2", {}, "Start a release"), element("div", { class: "fields" },
      select("Model", models.map((name) => [name, name]), models[0], null, { name: "model" }),
      field("Weights", { name: "weights", placeholder: "as they are", autocomplete: "off" }, "A known name, a Hugging Face id, a folder or a .gguf file."),
      field("Name of the revision", { name: "revision", placeholder: "made from the differences", autocomplete: "off" }),
      field("Canary shares", { name: "shares", placeholder: "0.01, 0.05, 0.25, 0.5", autocomplete: "off" }),
      field("Shortest stage, seconds", { name: "stage", type: "number", min: 0, placeholder: "60" }),
      field("Engine settings", { name: "settings", rows: 3, placeholder: "max_num_seqs = 64\nkv_cache_memory = 1GiB", spellcheck: "false" }, "One 'name = value' on each line.")),
    element("div", { class: "row end" }, element("button", { class: "primary" }, "Start the release"))]);
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const given = Object.fromEntries(new FormData(form));
    let settings;
    try { settings = readSettings(given.settings); } catch (error) { replace(complaint, problem(error)); return; }
    const policy = {};
    if (given.shares.trim()) policy.canary_shares = given.shares.split(",").map(Number);
    if (given.stage) policy.min_stage_s = Number(given.stage);
    document.activeElement?.blur();
    order("/admin/releases", { model: given.model || null, weights: given.weights.trim() || null, revision: given.revision.trim() || null, settings, policy }, "The release has begun.");
  });

  replace(root, heading("Releases", "A new revision of a model goes into service step by step, and is rolled back when it does worse."), complaint, list, form);
  drawForm();
  await repeat(signal, 2, load);
}

function readSettings(text) {
  const settings = {};
  for (const line of text.split("\n").map((each) => each.trim()).filter(Boolean)) {
    const [, name, value] = line.match(/^(\w+)\s*=\s*(.+)$/) ?? [];
    if (!name) throw new Error(`'${line}' is no setting. Write it as name = value.`);
    try { settings[name] = JSON.parse(value); } catch { settings[name] = value; }
  }
  return settings;
}
