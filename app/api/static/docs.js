/** Starts Swagger UI on the page /docs. A file of its own, because the page's policy allows no inline script. */

const STORED = "triton-gateway-key"; // shared with the console; kept as long as this tab is open
const form = document.getElementById("key");
const MANY_PATHS = 500; // Swagger UI needs half a minute to show the operations of 400 pipelines
const dark = matchMedia("(prefers-color-scheme: dark)");

/** Swagger UI has dark colours, and leaves it to the page when to use them. */
function follow() {
  document.documentElement.classList.toggle("dark-mode", dark.matches);
}

/** Adds the API key that the user typed in to the requests to this gateway. */
function withKey(request) {
  const key = sessionStorage.getItem(STORED);
  if (key && new URL(request.url, location.href).origin === location.origin) {
    request.headers = { ...request.headers, Authorization: `Bearer ${key}` };
  }
  return request;
}

/** The summary of an operation is a button. Swagger UI puts a link into it, which a button must not contain. */
const withoutNestedLinks = ({ React }) => ({
  wrapComponents: {
    DeepLink: (Original) => (props) =>
      props.path.includes("/") ? React.createElement("span", null, props.text) : React.createElement(Original, props),
  },
});

async function start() {
  const { headers } = withKey({ url: "/openapi.json" });
  const answer = await fetch("/openapi.json", { headers });
  form.hidden = answer.status !== 401;
  if (!form.hidden) return form.elements.key.focus();
  const spec = answer.ok ? await answer.json() : null;
  SwaggerUIBundle({
    ...(spec ? { spec } : { url: "/openapi.json" }),
    docExpansion: spec && Object.keys(spec.paths).length > MANY_PATHS ? "none" : "list",
    dom_id: "#swagger-ui",
    deepLinking: true,
    plugins: [withoutNestedLinks],
    requestInterceptor: withKey,
    presets: [SwaggerUIBundle.presets.apis, SwaggerUIBundle.SwaggerUIStandalonePreset],
  });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(STORED, form.elements.key.value.trim());
  form.elements.key.value = "";
  start();
});
dark.addEventListener("change", follow);
follow();
start();
