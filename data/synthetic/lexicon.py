"""The words of the synthetic German-English grammar.

Frequent words come first: the grammar draws the words at the top of a table more often. A letter
gives the kind of a noun: P person, A animal, T thing, X something to read, F food,
O place. An adjective or verb lists the kinds it goes with.
"""

# German singular (/ its accusative and dative, if different), gender, plural; English singular,
# plural ("-" for singular + s).
NOUNS = {
    "P": """
        Mann m Männer man men; Frau f Frauen woman women; Kind n Kinder child children;
        Lehrer m Lehrer teacher -; Mutter f Mütter mother -; Junge/Jungen m Jungen boy -;
        Mädchen n>f Mädchen girl -; Vater m Väter father -; Freund m Freunde friend -;
        Nachbar/Nachbarn m Nachbarn neighbour -; Arzt m Ärzte doctor -; Bruder m Brüder brother -;
        Schwester f Schwestern sister -; Student/Studenten m Studenten student -;
        Tochter f Töchter daughter -; Sohn m Söhne son -; König m Könige king -;
        Königin f Königinnen queen -; Bauer/Bauern m Bauern farmer -; Tante f Tanten aunt -;
        Onkel m Onkel uncle -; Gast m Gäste guest -; Kunde/Kunden m Kunden customer -;
        Großmutter f Großmütter grandmother -; Großvater m Großväter grandfather -;
        Polizist/Polizisten m Polizisten policeman policemen; Koch m Köche cook -;
        Kollege/Kollegen m Kollegen colleague -; Soldat/Soldaten m Soldaten soldier -;
        Krankenschwester f Krankenschwestern nurse -; Künstler m Künstler artist -;
        Anwalt m Anwälte lawyer -; Tourist/Touristen m Touristen tourist -;
        Sänger m Sänger singer -; Tänzerin f Tänzerinnen dancer -; Bäcker m Bäcker baker -;
        Dieb m Diebe thief thieves; Baby n Babys baby babies; Prinz/Prinzen m Prinzen prince -;
        Prinzessin f Prinzessinnen princess princesses; Richter m Richter judge -;
        Pilot/Piloten m Piloten pilot -; Schauspielerin f Schauspielerinnen actress actresses;
        Ingenieur m Ingenieure engineer -; Maler m Maler painter -; Gärtner m Gärtner gardener -;
        Fischer m Fischer fisherman fishermen; Bürgermeister m Bürgermeister mayor -;
        Journalist/Journalisten m Journalisten journalist -; Schüler m Schüler pupil -;
        Zeuge/Zeugen m Zeugen witness witnesses; Held/Helden m Helden hero heroes;
        Matrose/Matrosen m Matrosen sailor -; Riese/Riesen m Riesen giant -;
        Zwerg m Zwerge dwarf dwarfs; Dichter m Dichter poet -; Präsident/Präsidenten m Präsidenten
        president -""",
    "A": """
        Hund m Hunde dog -; Katze f Katzen cat -; Pferd n Pferde horse -; Vogel m Vögel bird -;
        Kuh f Kühe cow -; Maus f Mäuse mouse mice; Fisch m Fische fish fish; Bär/Bären m Bären
        bear -; Schaf n Schafe sheep sheep; Wolf m Wölfe wolf wolves; Löwe/Löwen m Löwen lion -;
        Ente f Enten duck -; Affe/Affen m Affen monkey -; Fuchs m Füchse fox foxes; Ziege f Ziegen
        goat -; Huhn n Hühner chicken -; Hase/Hasen m Hasen hare -; Schwein n Schweine pig -;
        Elefant/Elefanten m Elefanten elephant -; Gans f Gänse goose geese; Esel m Esel donkey -;
        Frosch m Frösche frog -; Schlange f Schlangen snake -; Biene f Bienen bee -; Tiger m Tiger
        tiger -; Eule f Eulen owl -; Kamel n Kamele camel -; Igel m Igel hedgehog -""",
    "T": """
        Tisch m Tische table -; Auto n Autos car -; Ball m Bälle ball -; Tasche f Taschen bag -;
        Stuhl m Stühle chair -; Bild n Bilder picture -; Uhr f Uhren clock -; Schlüssel m Schlüssel
        key -; Lampe f Lampen lamp -; Fahrrad n Fahrräder bicycle -; Schiff n Schiffe ship -;
        Flasche f Flaschen bottle -; Glas n Gläser glass glasses; Blume f Blumen flower -; Stein m
        Steine stone -; Hut m Hüte hat -; Messer n Messer knife knives; Teller m Teller plate -;
        Koffer m Koffer suitcase -; Kleid n Kleider dress dresses; Mantel m Mäntel coat -; Schuh m
        Schuhe shoe -; Hemd n Hemden shirt -; Ring m Ringe ring -; Geschenk n Geschenke gift -;
        Computer m Computer computer -; Kamera f Kameras camera -; Spiegel m Spiegel mirror -;
        Teppich m Teppiche carpet -; Decke f Decken blanket -; Korb m Körbe basket -; Münze f Münzen
        coin -; Gitarre f Gitarren guitar -; Klavier n Klaviere piano -; Regenschirm m Regenschirme
        umbrella -; Leiter f Leitern ladder -; Kerze f Kerzen candle -; Puppe f Puppen doll -; Seil
        n Seile rope -; Schachtel f Schachteln box boxes; Maschine f Maschinen machine -; Boot n
        Boote boat -; Bett n Betten bed -; Schrank m Schränke cupboard -; Geige f Geigen violin -;
        Telefon n Telefone telephone -""",
    "X": """
        Buch n Bücher book -; Brief m Briefe letter -; Geschichte f Geschichten story stories;
        Zeitung f Zeitungen newspaper -; Bericht m Berichte report -; Gedicht n Gedichte poem -;
        Roman m Romane novel -; Nachricht f Nachrichten message -; Artikel m Artikel article -;
        Märchen n Märchen fairytale -; Vertrag m Verträge contract -; Rede f Reden speech
        speeches""",
    "F": """
        Apfel m Äpfel apple -; Kuchen m Kuchen cake -; Ei n Eier egg -; Suppe f Suppen soup -;
        Kartoffel f Kartoffeln potato potatoes; Birne f Birnen pear -; Tomate f Tomaten tomato
        tomatoes; Keks m Kekse cookie -; Banane f Bananen banana -; Wurst f Würste sausage -; Pilz m
        Pilze mushroom -; Zwiebel f Zwiebeln onion -; Kirsche f Kirschen cherry cherries; Karotte f
        Karotten carrot -; Orange f Orangen orange -; Brötchen n Brötchen roll -""",
}

# Places: the same columns, after the German and the English preposition.
PLACES = """
    in in Garten m Gärten garden -; in in Haus n Häuser house -; in in Stadt f Städte city
    cities; in at Schule f Schulen school -; in in Küche f Küchen kitchen -; in in Park m Parks
    park -; in in Wald m Wälder forest -; auf at Markt m Märkte market -; auf on Straße f Straßen
    street -; in in Dorf n Dörfer village -; in in Büro n Büros office -; an at Bahnhof m
    Bahnhöfe station -; in in Kirche f Kirchen church churches; in in Zimmer n Zimmer room -; in
    in Krankenhaus n Krankenhäuser hospital -; an by See m Seen lake -; in in Hotel n Hotels
    hotel -; in in Museum n Museen museum -; an by Fluss m Flüsse river -; in in Bibliothek f
    Bibliotheken library libraries; an on Strand m Strände beach beaches; auf on Insel f Inseln
    island -; in in Keller m Keller cellar -; auf on Brücke f Brücken bridge -; in in Turm m
    Türme tower -; in in Schloss n Schlösser castle -; in in Theater n Theater theatre -; in in
    Restaurant n Restaurants restaurant -; auf on Berg m Berge mountain -; in in Fabrik f
    Fabriken factory factories; auf on Feld n Felder field -"""

NEARBY = [("hinter", "behind"), ("vor", "in front of"), ("neben", "next to")]

NAMES = """
    Anna f; Peter m; Maria f; Paul m; Julia f; Max m; Lena f; Felix m; Clara f; Otto m; Emma f;
    Jonas m"""

# Stem before an ending (/ the form without one, if different), English, kinds.
ADJECTIVES = """
    alt old PATXO; klein small PATFO; groß big PATFO; jung young PA; neu new TXO; gut good PXF;
    schön beautiful PATXO; rot red TF; arm poor P; reich rich P; stark strong PA; müd/müde tired
    PA; schwarz black AT; weiß white AT; klug clever PA; kalt cold FO; warm warm TF; lang long X;
    freundlich friendly PA; glücklich happy P; traurig sad PX; schwer heavy T; teur/teuer
    expensive TFO; hungrig hungry PA; krank sick PA; blau blue T; grün green TF; schnell fast A;
    billig cheap TF; dunkl/dunkel dark TO; frisch fresh F; süß sweet F; kurz short X; wichtig
    important PX; interessant interesting PXO; langweilig boring X; berühmt famous PXO; ruhig
    quiet PAO; leer empty TO; schmutzig dirty ATO; sauber clean TO; wild wild A; gefährlich
    dangerous AO; faul lazy PA; fleißig diligent P; mutig brave PA; ehrlich honest PX; höflich
    polite P; wütend angry PA; nervös nervous P; seltsam strange PATX; nützlich useful TX; gelb
    yellow TF; braun brown AT; grau grey AT; heiß hot F; leicht light T; laut loud PO; gesund
    healthy PAF; schwach weak PA"""

# Prefix|infinitive, third person, participle, auxiliary (h haben, s sein); English, past; kinds of
# the subject; kinds of the object after its case.
INTRANSITIVE = """
    schlafen schläft geschlafen h sleep slept PA; arbeiten arbeitet gearbeitet h work worked P;
    lachen lacht gelacht h laugh laughed P; warten wartet gewartet h wait waited PA; kommen kommt
    gekommen s come came PA; spielen spielt gespielt h play played PA; singen singt gesungen h
    sing sang P; laufen läuft gelaufen s run ran PA; tanzen tanzt getanzt h dance danced P;
    weinen weint geweint h cry cried P; auf|stehen steht aufgestanden s get_up got_up PA;
    an|kommen kommt angekommen s arrive arrived P; schwimmen schwimmt geschwommen s swim swam PA;
    bleiben bleibt geblieben s stay stayed PA; ein|schlafen schläft eingeschlafen s fall_asleep
    fell_asleep PA; verschwinden verschwindet verschwunden s disappear disappeared PA; reisen
    reist gereist s travel travelled P; lächeln lächelt gelächelt h smile smiled P; auf|wachen
    wacht aufgewacht s wake_up woke_up PA; träumen träumt geträumt h dream dreamed PA; weg|laufen
    läuft weggelaufen s run_away ran_away PA; kämpfen kämpft gekämpft h fight fought PA;
    zurück|kommen kommt zurückgekommen s come_back came_back PA; schreien schreit geschrien h
    shout shouted P; springen springt gesprungen s jump jumped PA; auf|geben gibt aufgegeben h
    give_up gave_up P; fallen fällt gefallen s fall fell PA; mit|kommen kommt mitgekommen s
    come_along came_along P; beten betet gebetet h pray prayed P; nach|denken denkt nachgedacht h
    reflect reflected P"""

TRANSITIVE = """
    sehen sieht gesehen h see saw PA PATXF; kaufen kauft gekauft h buy bought P TXFA; suchen
    sucht gesucht h look_for looked_for PA PATX; finden findet gefunden h find found PA PATXF;
    lesen liest gelesen h read read P X; kennen kennt gekannt h know knew P PX; lieben liebt
    geliebt h love loved P PAXF; essen isst gegessen h eat ate PA F; hören hört gehört h hear
    heard PA PA; treffen trifft getroffen h meet met P P; brauchen braucht gebraucht h need
    needed P PATX; schreiben schreibt geschrieben h write wrote P X; an|rufen ruft angerufen h
    call called P P; besuchen besucht besucht h visit visited P P; nehmen nimmt genommen h take
    took P TXF; tragen trägt getragen h carry carried P TAXF; verkaufen verkauft verkauft h sell
    sold P TXFA; fragen fragt gefragt h ask asked P P; ein|laden lädt eingeladen h invite invited
    P P; holen holt geholt h fetch fetched PA TXFP; verlieren verliert verloren h lose lost P TX;
    ab|holen holt abgeholt h pick_up picked_up P PTX; vergessen vergisst vergessen h forget
    forgot P PTX; kochen kocht gekocht h cook cooked P F; verstehen versteht verstanden h
    understand understood P PX; werfen wirft geworfen h throw threw P TF; malen malt gemalt h
    paint painted P PAT; waschen wäscht gewaschen h wash washed P TFA; beobachten beobachtet
    beobachtet h watch watched PA PA; mit|nehmen nimmt mitgenommen h take_along took_along P
    PATX; retten rettet gerettet h save saved P PA; weg|werfen wirft weggeworfen h throw_away
    threw_away P TXF; stehlen stiehlt gestohlen h steal stole PA TXF; verstecken versteckt
    versteckt h hide hid P TXFA; jagen jagt gejagt h hunt hunted PA A; füttern füttert gefüttert
    h feed fed P A; fangen fängt gefangen h catch caught PA A; reparieren repariert repariert h
    repair repaired P T; benutzen benutzt benutzt h use used P T; zerstören zerstört zerstört h
    destroy destroyed PA TX; wecken weckt geweckt h wake woke PA PA; vor|lesen liest vorgelesen h
    read_aloud read_aloud P X; küssen küsst geküsst h kiss kissed P P; grüßen grüßt gegrüßt h
    greet greeted P P; loben lobt gelobt h praise praised P PX; hassen hasst gehasst h hate hated
    P PAX; bewundern bewundert bewundert h admire admired P PTX; aus|leihen leiht ausgeliehen h
    borrow borrowed P TX; zeichnen zeichnet gezeichnet h draw drew P PAT; probieren probiert
    probiert h taste tasted PA F; begleiten begleitet begleitet h accompany accompanied P P;
    ein|packen packt eingepackt h pack packed P TXF; übersetzen übersetzt übersetzt h translate
    translated P X; sammeln sammelt gesammelt h collect collected P TX; zählen zählt gezählt h
    count counted P TAF; backen backt gebacken h bake baked P F; heiraten heiratet geheiratet h
    marry married P P; auf|essen isst aufgegessen h eat_up ate_up PA F; kennen|lernen lernt
    kennengelernt h get_to_know got_to_know P P; unterschreiben unterschreibt unterschrieben h
    sign signed P X; zurück|bringen bringt zurückgebracht h bring_back brought_back P TXA;
    vor|bereiten bereitet vorbereitet h prepare prepared P XF; umarmen umarmt umarmt h hug hugged
    P PA"""

DATIVE = """
    helfen hilft geholfen h help helped PA P; danken dankt gedankt h thank thanked P P; folgen
    folgt gefolgt s follow followed PA PA; antworten antwortet geantwortet h answer answered P P;
    glauben glaubt geglaubt h believe believed P P; zu|hören hört zugehört h listen_to
    listened_to P PA; vertrauen vertraut vertraut h trust trusted PA P; begegnen begegnet
    begegnet s encounter encountered PA PA; gratulieren gratuliert gratuliert h congratulate
    congratulated P P; dienen dient gedient h serve served P P; gehorchen gehorcht gehorcht h
    obey obeyed PA P; drohen droht gedroht h threaten threatened P P; verzeihen verzeiht
    verziehen h forgive forgave P P; widersprechen widerspricht widersprochen h contradict
    contradicted P P"""

DITRANSITIVE = """
    geben gibt gegeben h give gave P TXF; zeigen zeigt gezeigt h show showed P TXA; bringen
    bringt gebracht h bring brought PA TXF; schicken schickt geschickt h send sent P TX; erzählen
    erzählt erzählt h tell told P X; leihen leiht geliehen h lend lent P TX; an|bieten bietet
    angeboten h offer offered P TXF; versprechen verspricht versprochen h promise promised P TXA;
    reichen reicht gereicht h hand handed P TXF"""

REPORTING = """
    sagen sagt gesagt h say said P; wissen weiß gewusst h know knew P; glauben glaubt geglaubt h
    believe believed P; denken denkt gedacht h think thought P; hoffen hofft gehofft h hope hoped
    P; hören hört gehört h hear heard P; behaupten behauptet behauptet h claim claimed P"""

WEATHER = """
    regnen regnet geregnet h rain rained W; schneien schneit geschneit h snow snowed W;
    stürmen stürmt gestürmt h storm stormed W"""

# ich and er, wir and sie; English with and without -s; whether it needs do in English.
MODALS = [
    ("kann", "können", "can", "can", False),
    ("muss", "müssen", "has to", "have to", True),
    ("will", "wollen", "wants to", "want to", True),
    ("soll", "sollen", "should", "should", False),
    ("darf", "dürfen", "may", "may", False),
]

# German, English, tenses: n present, p past, f future and modal.
TIMES = """
    heute/today/npf; gestern/yesterday/p; morgen/tomorrow/f; jetzt/now/n; jeden Tag/every
    day/npf; am Abend/in the evening/npf; am Morgen/in the morning/npf; letzte Woche/last week/p;
    bald/soon/f; nächste Woche/next week/f; in der Nacht/at night/npf; am Montag/on Monday/npf;
    letztes Jahr/last year/p; am Freitag/on Friday/npf; heute Abend/this evening/nf; gestern
    Abend/last night/p; nächstes Jahr/next year/f; im Sommer/in summer/npf; am Sonntag/on
    Sunday/npf; vor drei Tagen/three days ago/p; im Winter/in winter/npf; vor zwei Jahren/two
    years ago/p; in zwei Tagen/in two days/f; nach dem Essen/after the meal/npf; vor dem
    Frühstück/before breakfast/npf"""

FREQUENCIES = [
    ("oft", "often"),
    ("manchmal", "sometimes"),
    ("immer", "always"),
    ("nie", "never"),
    ("selten", "rarely"),
]

MANNERS = """
    schnell/quickly; langsam/slowly; leise/quietly; gern/gladly; allein/alone; laut/loudly;
    heimlich/secretly; vorsichtig/carefully"""

DEGREES = [("sehr", "very"), ("zu", "too"), ("ziemlich", "quite")]

NUMBERS = """
    zwei/two; drei/three; vier/four; fünf/five; sechs/six; sieben/seven; acht/eight; neun/nine;
    zehn/ten; elf/eleven; zwölf/twelve"""

# German, English; the tenses of both clauses are the same.
SUBORDINATORS = [
    ("weil", "because"),
    ("wenn", "when"),  # als in the past
    ("obwohl", "although"),
    ("während", "while"),
    ("bevor", "before"),
]

COORDINATORS = [("und", "and"), (", aber", ", but"), (", denn", ", for")]
