// What scripts of clients have in common: the server's address, and one JSON line per capability.
export const { BASE_URL, API_KEY, MODEL } = process.env;

export function report(capability, ok, note = "") {
  console.log(JSON.stringify({ capability, ok, note }));
}

// Report that the asynchronous function works, or the exception that it throws. The script goes on after an exception.
export async function capability(name, action, note = "") {
  try {
    await action();
    report(name, true, note);
  } catch (error) {
    console.error(error);
    report(name, false, `${error.name}: ${error.message}`.slice(0, 500));
  }
}
