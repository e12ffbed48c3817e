/** Whether the screen has place for one column only, as on a phone. */

import { useEffect, useState } from "./lib.js";

const QUERY = matchMedia("(max-width: 46rem)");

export function useNarrow() {
  const [isNarrow, setNarrow] = useState(QUERY.matches);
  useEffect(() => {
    const update = () => setNarrow(QUERY.matches);
    update(); // The width may have changed between the first render and this effect.
    QUERY.addEventListener("change", update);
    return () => QUERY.removeEventListener("change", update);
  }, []);
  return isNarrow;
}
