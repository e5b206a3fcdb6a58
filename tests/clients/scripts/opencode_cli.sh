# opencode: one task, with the shell, over chat completions.
set -u
source "$SCRIPTS/agent_checks.sh"
mkdir -p task && cd task
settings() {
  cat <<JSON
{"model": "penstock/$MODEL", "small_model": "penstock/$MODEL", "autoupdate": false, "share": "disabled",
 "provider": {"penstock": {"npm": "@ai-sdk/openai-compatible", "name": "Penstock",
   "options": {"baseURL": "$BASE_URL/v1", "apiKey": "$1"},
   "models": {"$MODEL": {"name": "$MODEL", "limit": {"context": 300000, "output": 4000}}}}}}
JSON
}
agent() {
  OPENCODE_CONFIG_CONTENT=$(settings "$1") timeout 100 opencode run -m "penstock/$MODEL" "$2" </dev/null >said.log 2>&1
  local status=$?
  cat said.log
  [ $status = 0 ] && ! grep -qi 'error' said.log
}
agent_checks
