# The command `llm`: prompts, streams, schemas, tools and errors.
set -u
export LLM_USER_PATH="$HOME/llm"
mkdir -p "$LLM_USER_PATH"
cat >"$LLM_USER_PATH/extra-openai-models.yaml" <<YAML
- model_id: penstock
  model_name: $MODEL
  api_base: $BASE_URL/v1
  api_key_name: penstock
  supports_schema: true
  supports_tools: true
- model_id: absent
  model_name: no-such-model
  api_base: $BASE_URL/v1
  api_key_name: penstock
YAML
llm keys set penstock --value "$API_KEY"
report() { printf '{"capability": "%s", "ok": %s, "note": ""}\n' "$1" "$2"; }
check() { # a capability, and the command that shows it
  local name=$1
  shift
  if "$@"; then report "$name" true; else report "$name" false; fi
}
whole() { [ -n "$(llm -m penstock --no-stream -o max_tokens 20 'What is the capital of France?')" ]; }
stream() { [ -n "$(llm -m penstock -o max_tokens 20 'What is the capital of France?')" ]; }
structured() {
  local schema='{"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}, "required": ["name"]}'
  llm -m penstock --schema "$schema" -o temperature 0 -o max_tokens 100 'Invent a dog' | python3 -c 'import json, sys; json.load(sys.stdin)["name"]'
}
tools() {
  llm -m penstock -o temperature 0 -o max_tokens 60 --functions 'def weather(city: str) -> str: return "sunny"' 'Weather in Paris?' >&2
}
errors() { llm -m absent 'Hello' 2>&1 | grep -q 'not served here'; }
check chat whole
check stream stream
check tools tools
check structured structured
check errors errors
