curl "$ACS_API_BASE/completions" \
  -H "Authorization: Bearer $ACS_API_KEY" \
  -H "Content-Type: application/json" \
  -d '{"model": "llama-8b", "prompt": [128000, 791, 13180, 374], "max_tokens": 1, "output_residual_stream": [1]}'
