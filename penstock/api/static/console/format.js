// Figures as people read them. A value that is not known is a dash.

const DASH = "–";
const isKnown = (value) => value !== null && value !== undefined && Number.isFinite(value);

export function number(value, digits = null) {
  if (!isKnown(value)) return DASH;
  const size = Math.abs(value);
  const places = digits ?? (size === 0 || size >= 100 || Number.isInteger(value) ? 0 : size >= 10 ? 1 : 2);
  return value.toLocaleString("en", { maximumFractionDigits: places });
}

export function compact(value) {
  if (!isKnown(value)) return DASH;
  return Math.abs(value) < 10_000 ? number(value)
    : value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });
}

export function seconds(value) {
  if (!isKnown(value)) return DASH;
  if (value < 0.0005) return value === 0 ? "0 ms" : "<1 ms";
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${number(value, value < 10 ? 2 : 1)} s`;
  return value < 7200 ? `${number(value / 60, 0)} min` : `${number(value / 3600, 1)} h`;
}

export function share(value) {
  return isKnown(value) ? `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %` : DASH;
}

export function money(value) {
  if (!isKnown(value)) return DASH;
  return `$${value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: value !== 0 && Math.abs(value) < 0.1 ? 6 : 2 })}`;
}

export function time(at, withDate = false) {
  if (!isKnown(at)) return DASH;
  const moment = new Date(at * 1000);
  const clock = moment.toLocaleTimeString("en-GB");
  return withDate ? `${moment.toLocaleDateString("en-CA")} ${clock}` : clock;
}

export function shortTime(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
}
