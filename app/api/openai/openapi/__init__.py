"""The part of the OpenAPI document about OpenAI's addresses, typed from the pipelines that declare ``openai:``."""

from app.admission.keys import Key
from app.api.access import allows_pipeline
from app.api.openai.openapi.answers import ANSWERS
from app.api.openai.openapi.paths import MODEL_PATHS, REFUSALS, chat_path, completions_path, embeddings_path
from app.api.openapi.document import Described
from app.pipelines.catalog import Catalog


def described(catalog: Catalog, key: Key | None) -> Described:
    """Omits addresses that no pipeline serves."""
    entries = catalog.entries.items()
    pipelines = [entry.pipeline for name, entry in entries if entry.pipeline and allows_pipeline(key, name)]
    served = [(pipeline, pipeline.openai) for pipeline in pipelines if pipeline.openai is not None]
    completions = [(pipeline, form.completions) for pipeline, form in served if form.completions is not None]
    chats = [(pipeline, form.chat) for pipeline, form in served if form.chat is not None]
    embeddings = [(pipeline, form.embeddings) for pipeline, form in served if form.embeddings is not None]
    paths = {
        **MODEL_PATHS,
        **(completions_path(completions) if completions else {}),
        **(chat_path(chats) if chats else {}),
        **(embeddings_path(embeddings) if embeddings else {}),
    }
    return Described(paths, ANSWERS, REFUSALS, tags={"openai": "The addresses of OpenAI's API"})
