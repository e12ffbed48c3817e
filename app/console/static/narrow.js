/** Whether the screen has place for one column only, as on a phone. */

import { useEffect, useState } from "./lib.js";

const QUERY = matchMedia("(max-width: 46rem)");

export function useNarrow() {
  const [isNarrow, setNarrow] = useState(QUERY.matches);
  useEffect(() => {
    const changed = (event) => setNarrow(event.matches);
    QUERY.addEventListener("change", changed);
    return () => QUERY.removeEventListener("change", changed);
  }, []);
  return isNarrow;
}
