"""A contract for import-linter: a package imports another one through what that states as its public API."""

from importlinter import Contract, ContractCheck, fields, output


class PublicApiContract(Contract):
    """Modules of one root package import from another root package only what `public_modules` names.

    Options:
        public_modules: the modules that other packages may import; each states its names in `__init__.pyi` or itself.
    """

    type_name = "public_api"
    public_modules = fields.SetField(subfield=fields.StringField())

    def check(self, graph, verbose: bool) -> ContractCheck:
        roots = set(self.session_options["root_packages"])
        public = roots | set(self.public_modules)  # pyright: ignore[reportArgumentType] - a field gives its value
        inner = sorted(
            (importer, imported)
            for importer in graph.modules
            for imported in graph.find_modules_directly_imported_by(importer)
            if imported.partition(".")[0] in roots - {importer.partition(".")[0]} and imported not in public
        )
        return ContractCheck(kept=not inner, metadata={"inner": inner})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, imported in check.metadata["inner"]:
            output.print_error(f"{importer} imports {imported}, which is an inner module of another package")
