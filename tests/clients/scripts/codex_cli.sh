# OpenAI's Codex CLI: one task, with the shell, over the Responses API.
set -u
source "$SCRIPTS/agent_checks.sh"
mkdir -p "$HOME/.codex" task && cd task
cat >"$HOME/.codex/config.toml" <<TOML
model = "$MODEL"
model_provider = "penstock"
[model_providers.penstock]
name = "Penstock"
base_url = "$BASE_URL/v1"
env_key = "PENSTOCK_API_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
TOML
agent() {
  PENSTOCK_API_KEY=$1 timeout 100 codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "$2" </dev/null
}
agent_checks
