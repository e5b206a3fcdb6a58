# pi: one task, with the shell, over chat completions, the Responses API and Anthropic's Messages.
set -u
source "$SCRIPTS/agent_checks.sh"
mkdir -p task "$HOME/.pi/agent" && cd task
provider() {  # the API, the address and the key
  printf '"%s": {"baseUrl": "%s", "api": "%s", "apiKey": "%s", "models": [{"id": "%s"}]}' "$1" "$2" "$1" "$3" "$MODEL"
}
agent() {
  printf '{"providers": {%s, %s, %s}}' "$(provider openai-completions "$BASE_URL/v1" "$1")" \
    "$(provider openai-responses "$BASE_URL/v1" "$1")" "$(provider anthropic-messages "$BASE_URL" "$1")" \
    >"$HOME/.pi/agent/models.json"
  local api said
  for api in openai-completions openai-responses anthropic-messages; do
    said=$(timeout 100 pi --provider "$api" --model "$MODEL" -p "$2" </dev/null) || return 1
    [[ "$said" == *"has run its tool"* ]] || { printf '%s: %s\n' "$api" "$said"; return 1; }
  done
  printf '%s\n' "$said"
}
agent_checks
