/** Components that are loaded when they are first shown. */

import { html, useEffect, useState } from "./lib.js";

/** `load` returns a component, or null if there is none. */
export function lazy(load) {
  return function Lazy(props) {
    const [Content, setContent] = useState(null);
    useEffect(() => {
      load().then((loaded) => setContent(() => loaded));
    }, []);
    return Content && html`<${Content} ...${props} />`;
  };
}
