// What the list of /v1/models tells about the models.

// Models of external servers are listed as "external": their prompts do leave this server.
export function staysHere(models) {
  return models.length > 0 && models.every((model) => model.owned_by === "penstock");
}

// Whether each of the named models takes images.
export function takeImages(models, names) {
  return names.every((name) => models.find(({ id }) => id === name)?.input_modalities?.includes("image") ?? false);
}

// The wanted model if this server has it, else the first.
export function known(models, wanted) {
  return models.some(({ id }) => id === wanted) ? wanted : (models[0]?.id ?? wanted);
}
