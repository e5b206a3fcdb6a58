# What the scripts of coding agents have in common. Each defines `agent`, which takes a key and a prompt, runs the agent
# once in the current folder and prints what the agent says.
report() { printf '{"capability": "%s", "ok": %s, "note": "%s"}\n' "$1" "$2" "$3"; }
agent_checks() {
  local said
  said=$(agent "$API_KEY" 'Run the tool.' 2>agent.log)
  cat agent.log >&2
  if [[ "$said" == *"The agent has run its tool."* ]]; then
    report chat true ''
    report stream true ''
    report tools true 'a whole loop with its shell'
  else
    printf '%s\n' "$said" >&2
    for name in chat stream tools; do report "$name" false ''; done
  fi
  if agent wrong-key 'Run the tool.' >wrong.log 2>&1; then report errors false 'a wrong key'; else report errors true ''; fi
  cat wrong.log >&2
}
